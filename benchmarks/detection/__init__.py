"""Faults injected into real trainings of two ranks: which of them reach a person, and how many false messages come."""
