"""Data model of datasets and records: fields, kinds, events, identity."""
