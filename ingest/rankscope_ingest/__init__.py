"""The ingest service: it finds the ranks, pulls every record of each, and commits them to the store exactly once.

Pure parts (batch, decode, incidents, registry, runs) take values and a clock reading; sockets, files and signals are
in the thin modules around them (fetch, loop, http, service).
"""
