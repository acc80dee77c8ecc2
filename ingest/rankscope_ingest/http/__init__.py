"""HTTP routes of the service, and HTTP service discovery for Prometheus."""
