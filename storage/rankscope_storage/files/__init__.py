"""Data files: the partition of each row, the order and encoding of rows in a file, and durable writing."""
