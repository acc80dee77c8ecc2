"""Conversion of stored rows to OpenMetrics text, column by column: lines, metric families and timestamps."""
