"""The store: one Delta table of Parquet files, appended exactly once, read through DuckDB.

`rankscope_storage.api.store.Store` writes, and `rankscope_storage.connection.connect` queries. Each folder imports only
folders of lower layers; `pyproject.toml` lists the layers.
"""
