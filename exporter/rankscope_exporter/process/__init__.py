"""Modules about the training process: its identity, fork and exit, stop signals, and the threads of the monitor."""
