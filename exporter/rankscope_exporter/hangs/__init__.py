"""A rank that gives no sign of life: who notices, and where it stands."""
