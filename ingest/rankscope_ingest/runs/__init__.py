"""Runs, attempts, ranks and incidents: their states, timeouts, root causes, and the texts that describe them."""
