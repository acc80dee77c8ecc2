"""Generation of the provisioning files that a Grafana server reads when it starts."""
