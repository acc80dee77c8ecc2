"""Data files: which rows one holds, in which order and form they lie in it, and its way to the disk."""
