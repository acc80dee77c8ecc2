"""Measures the time of each step by phase: forward, backward, optimizer, and the phases that the script announces."""
