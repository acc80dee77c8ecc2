"""Schemas, errors and fsync: modules that all other folders use and that import none of them."""
