"""Start the service, Prometheus and Alertmanager for `rankscope up`: configuration, ports, processes, restarts."""
