"""Grafana boards and Prometheus rules, rendered from the contract."""
