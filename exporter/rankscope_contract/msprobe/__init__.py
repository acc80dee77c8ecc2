"""The output of the existing tool on disk: its names and its layout, for what writes it and what reads it."""
