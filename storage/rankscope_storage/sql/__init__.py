"""SQL text of all views and table macros of the store. No module of this folder reads a file."""
