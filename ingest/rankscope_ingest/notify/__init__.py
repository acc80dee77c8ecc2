"""Incidents, the text of notifications, and their delivery."""
