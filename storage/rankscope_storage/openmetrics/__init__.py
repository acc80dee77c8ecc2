"""The store as OpenMetrics text, for both directions: which metric and labels stand for which columns."""
