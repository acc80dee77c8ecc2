"""Reactions to cost and to anomalies: the overhead controller, anomaly capture, and the callback of the script."""
