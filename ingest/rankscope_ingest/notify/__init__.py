"""Notifications: delivery of the texts about incidents."""
