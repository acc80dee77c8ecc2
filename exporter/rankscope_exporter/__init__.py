"""Runs inside the training process: hooks, statistics, step records, HTTP. Training never stops for it."""
