"""Errors, options, the HTTP client, and access to the store and the service settings.

All other folders of this package may import this folder.
"""
