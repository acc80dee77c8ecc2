"""Prometheus remote read: decode requests, query the store, encode responses."""
