"""Modules that all commands share: errors, options, HTTP client, access to the store and the service settings.

All other folders of this package may import this folder.
"""
