"""Data of processes that have ended: orphaned spool files, runs known only from them, and lost records."""
