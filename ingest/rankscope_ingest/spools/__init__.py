"""Reading the spools of processes that have ended."""
