"""Runs, attempts and ranks: their states, liveness, root causes and incidents, and all texts about them."""
