"""Registered targets and their poll loops."""
