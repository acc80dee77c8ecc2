"""Scrape Prometheus exporters: find them, fetch and parse their pages, and build rows and staleness markers."""
