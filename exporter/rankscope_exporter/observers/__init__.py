"""Observers that run on every step, sampled or not: time by phase, throughput, memory, and CPU time of the monitor."""
