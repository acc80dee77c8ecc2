"""Questions: DuckDB on the files of a version, of which each question sees those that can matter."""
