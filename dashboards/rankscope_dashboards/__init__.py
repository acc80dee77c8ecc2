"""Grafana boards, alert rules and configuration of Prometheus and Alertmanager, generated from `rankscope_contract`."""
