"""The process of a rank: its identity, its threads, forks, exit, and signals."""
