"""Receive Prometheus remote write: decode requests, collect samples in batches, and respond after the commit."""
