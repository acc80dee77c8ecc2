"""Prometheus' remote read protocol: decode requests, read the store, encode responses."""
