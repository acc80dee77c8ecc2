"""Data model of datasets and records: fields, kinds, events, identity, stacks, flight records, groups of ranks."""
