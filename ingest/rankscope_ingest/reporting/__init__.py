"""Reports about runs and about the service: metrics, progress, goodput, rows of events and dimensions."""
