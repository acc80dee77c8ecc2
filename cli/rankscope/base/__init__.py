"""Errors, options and clients that all other folders of the command use."""
