"""Scraping of Prometheus exporters: discovery, HTTP, parsers, tables of samples, staleness markers."""
