"""Catalogue of the metrics that ranks, node pages and the service export."""
