"""Analyse statements: the views, files and rows that one needs, and facts about files. Opens no DuckDB instance."""
