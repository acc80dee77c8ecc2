"""The text of every view and table macro. Nothing here reads a file."""
