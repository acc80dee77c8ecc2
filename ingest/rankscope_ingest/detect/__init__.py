"""Detection from records and from the clock: incidents, failed runs, stalls, replica divergence."""
