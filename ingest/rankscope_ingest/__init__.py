"""The ingest service polls every record of all ranks and commits each record to the store exactly once.

The modules that decide (batching, decoding, run states, incidents) are pure: values and the time are arguments. Small
modules around them contain sockets, files and signals.
"""
