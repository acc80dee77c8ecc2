"""Files that a Grafana server reads at its start."""
