"""Changes of the sampling configuration during training: their sources, agreement among ranks, and their queue."""
