"""Reactions to overhead and to anomalies: the overhead controller, anomaly capture, and the script's `on_anomaly`."""
