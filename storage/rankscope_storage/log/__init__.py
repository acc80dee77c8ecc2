"""The Delta log: versions, commits, checkpoints, damage, and the locks of writers.

No other folder knows the files of the log or the mutex of rewrites.
"""
