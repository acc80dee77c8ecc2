"""The way of rows into the store: batches, flushes, quarantine, and scheduled maintenance of the store."""
