"""Deliver notifications about incidents to the configured URLs."""
