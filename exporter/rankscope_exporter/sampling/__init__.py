"""Decide which quantities are measured at which steps; manage their entries in statistics table and plan."""
