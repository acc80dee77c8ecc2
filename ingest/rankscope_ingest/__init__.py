"""The ingest service: it polls every record of all ranks and commits each of them to the store exactly once.

The modules that decide (batching, decoding, run states, incidents) are pure: they take values and the time. Sockets,
files and signals are in small modules around them.
"""
