"""Compatibility with the configuration and the calls of other monitors."""
