"""The ingest service polls every record of all ranks and commits each record to the store exactly once.

The modules that decide (batching, decoding, run states, incidents) have no side effects and receive values and the
current time as arguments. Small modules around them use sockets, files and signals.
"""
