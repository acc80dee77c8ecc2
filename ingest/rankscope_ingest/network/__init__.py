"""Networking of the service: allowed addresses, HTTP client, listening socket, and authentication of requests."""
