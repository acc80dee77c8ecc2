"""Errors, options, the HTTP client and access to store and service settings. All other folders may import this one."""
