"""Diagnosis of hangs: stacks, flight records, and the rank that holds up the others."""
