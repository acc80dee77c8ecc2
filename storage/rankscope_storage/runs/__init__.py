"""Edits of one run by users: tags and notes, renaming, merging and removal."""
