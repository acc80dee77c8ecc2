"""Catalogue of the metrics that a rank, a node page and the service export."""
