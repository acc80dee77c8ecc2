"""Changes of the sampling configuration while training runs, at the same step on all ranks."""
