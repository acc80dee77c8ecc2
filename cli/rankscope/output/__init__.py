"""Text, tables and progress displays that the commands print."""
