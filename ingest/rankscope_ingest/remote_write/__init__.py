"""Prometheus remote write: decode requests, gather samples into batches, respond after the commit."""
