"""The store: one Delta table of Parquet files, appended exactly once, read through DuckDB."""
