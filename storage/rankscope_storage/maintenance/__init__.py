"""Table maintenance: compaction, retention, vacuum, check, repair and statistics of a store."""
