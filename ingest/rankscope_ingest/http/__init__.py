"""HTTP interface of the service: its routes, and service discovery for Prometheus."""
