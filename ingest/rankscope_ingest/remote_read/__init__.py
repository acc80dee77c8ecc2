"""Serve Prometheus remote read: decode requests, query the store, and encode responses."""
