"""Definitions of the alerts on training runs, ranks, GPUs and the service."""
