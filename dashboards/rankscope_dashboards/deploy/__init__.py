"""Generation of the configuration files of Prometheus and Alertmanager from settings."""
