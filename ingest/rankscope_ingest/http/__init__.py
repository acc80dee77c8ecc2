"""The service's HTTP routes, and Prometheus' HTTP service discovery."""
