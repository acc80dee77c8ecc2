"""Prometheus' remote read over the store: its messages, and what answers them."""
