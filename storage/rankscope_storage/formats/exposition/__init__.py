"""OpenMetrics text of stored rows, in columns: lines, families and timestamps."""
