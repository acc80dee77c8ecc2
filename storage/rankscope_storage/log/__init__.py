"""The Delta log: versions, commits, checkpoints, damaged files, and the locks of writers.

No other folder accesses the files of the log, or the transaction that serialises rewrites (commits that replace files
of other commits).
"""
