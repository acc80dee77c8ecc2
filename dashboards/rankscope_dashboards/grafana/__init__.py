"""Deployment of data sources, boards and alert rules to a running Grafana server through its API."""
