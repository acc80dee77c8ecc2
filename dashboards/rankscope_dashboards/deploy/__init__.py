"""Configuration files of Prometheus and Alertmanager, built from settings."""
