"""Comparison of two runs, attempts or ranks: both sides as SQL, and the first step at which they differ."""
