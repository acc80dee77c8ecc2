"""Text, tables and progress display that the commands print."""
