"""Schemas, errors and fsync. All other folders use these modules, which import no other folder."""
