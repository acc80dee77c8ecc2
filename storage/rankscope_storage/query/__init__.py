"""Analysis of statements: the views and files that one needs, and facts about files. No open DuckDB instance."""
