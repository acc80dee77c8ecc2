"""The serving side of a rank: keeps finished step records and hands them out over HTTP. Knows nothing of torch."""
