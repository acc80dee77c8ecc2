"""Grafana boards, alert rules, and the configuration of Prometheus and Alertmanager.

Generated from `rankscope_contract`.
"""
