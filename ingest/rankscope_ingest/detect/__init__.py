"""Detect incidents, failed runs, stalls and replica divergence from polled records and from timeouts."""
