"""Maintenance of a store: check, repair, compaction, retention, rollups, statistics and vacuum."""
