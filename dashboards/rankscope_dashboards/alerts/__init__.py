"""Alerts on training runs, ranks, GPUs and the service, as values."""
