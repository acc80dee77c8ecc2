"""Prometheus' remote write protocol: decode requests, batch samples, respond after the commit."""
