"""Changes of the sampling while training runs, by the user, the overhead controller or an anomaly; `on_anomaly`."""
