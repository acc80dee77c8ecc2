"""Decide which quantities are measured at which steps, and manage their rows of the statistics table and the plan."""
