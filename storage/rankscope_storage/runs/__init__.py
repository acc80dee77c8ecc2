"""Edits of a run by users: tags and notes, renaming, joining with another run, and removal."""
