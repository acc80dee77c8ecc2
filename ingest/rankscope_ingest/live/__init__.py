"""Figures of running trainings and of the service, kept in memory: metrics, progress, goodput, latest steps."""
