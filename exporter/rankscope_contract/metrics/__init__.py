"""Catalogue of metrics: name, type, unit, labels and the column of each metric."""
