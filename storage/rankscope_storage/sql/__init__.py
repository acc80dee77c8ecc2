"""SQL text of all views and table macros. No module here reads a file."""
