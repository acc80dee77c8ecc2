"""The service: finds ranks, pulls their records, batches them, follows runs, tells people."""
