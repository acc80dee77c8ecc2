"""Decide which quantities are measured at which steps, and manage their table rows and plan entries."""
