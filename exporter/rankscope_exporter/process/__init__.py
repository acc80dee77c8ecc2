"""The training process: identity, fork and exit, stop signals, threads of the monitor."""
