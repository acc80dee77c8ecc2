"""From received rows to commits: batches, flushes, quarantine, and scheduled maintenance of the store."""
