"""Changes of the sampling configuration during training: their sources, the log that ranks share, and their queue."""
