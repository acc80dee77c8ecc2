"""Entry points of the package: opening a store for writing, and summaries of its runs."""
