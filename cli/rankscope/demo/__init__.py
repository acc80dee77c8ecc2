"""The parts of `rankscope demo`: an alert receiver, Prometheus with Alertmanager, and the final checks and report."""
