"""Compatibility with the configuration files and the Python calls of other monitors."""
