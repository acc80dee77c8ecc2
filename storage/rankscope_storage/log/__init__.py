"""The Delta log: versions, commits, checkpoints, damaged files, and the locks of writers.

No other folder accesses files of the log or the mutex of rewrites.
"""
