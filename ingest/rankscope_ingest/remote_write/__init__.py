"""Prometheus' remote write: samples that others push, into `samples`, answered when they are stored."""
