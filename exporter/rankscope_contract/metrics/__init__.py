"""Catalogue of the metrics that ranks and the service export."""
