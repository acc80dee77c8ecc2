"""Which quantities are due at a step, the plan they fill, and what they write to."""
