"""Threads that run in parallel with the training: hardware metrics, flight recorder, detection of hangs."""
