"""The configuration of a monitor: its settings, their checks, and the files they are read from."""
