"""Which quantities are measured at which steps, and the table rows and plan entries that they write to."""
