"""Analysis of statements: the views, files and rows that a statement needs, and facts about files.

No module of this folder opens a DuckDB instance.
"""
