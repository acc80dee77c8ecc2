"""The life of runs: attempts, what is known of their ranks, and what follows from it."""
