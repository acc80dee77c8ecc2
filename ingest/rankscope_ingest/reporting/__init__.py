"""Reports about runs and about the service: metrics, progress, goodput, and rows for events, runs and tensors."""
