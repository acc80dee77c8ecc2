"""The training process: errors, checks of settings, identity, fork and exit, stop signals, threads of the monitor."""
