"""Allowed addresses, the HTTP client, listening sockets, and authentication of requests."""
