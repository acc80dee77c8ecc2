"""Detection from records and from the clock: incidents, failures, stalls, replica divergence."""
