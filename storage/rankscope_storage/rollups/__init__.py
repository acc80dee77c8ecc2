"""The tier behind raw rows: one row per series and bucket of 100 steps. SQL text, like all views."""
