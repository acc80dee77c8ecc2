"""Decide which quantities are measured at which steps, and own the table rows and plan entries that they fill."""
