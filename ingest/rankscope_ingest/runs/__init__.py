"""States of runs, attempts and ranks, liveness of processes, and the root cause of a failure."""
