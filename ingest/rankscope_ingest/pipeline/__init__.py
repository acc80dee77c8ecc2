"""Process received rows until they are committed: batches, flushes, quarantine, and maintenance of the store."""
