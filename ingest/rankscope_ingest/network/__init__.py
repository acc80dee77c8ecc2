"""Addresses that the service may connect to, sockets that it listens on, and authentication of requests."""
