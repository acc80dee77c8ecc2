"""Diagnosis of hangs: stacks, flight records, and the rank that blocks the others."""
