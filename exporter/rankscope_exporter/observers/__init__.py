"""Observers that run on every step, sampled or not: time by phase, throughput, memory, and the monitor's own cost."""
