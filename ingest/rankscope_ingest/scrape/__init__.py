"""Scraping of Prometheus exporters: discovery, requests, parsers, tables of samples, staleness markers."""
