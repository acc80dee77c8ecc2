"""SQL queries of a store. `connect` opens the store; each query of a `Connection` reads the newest version.

Internally, a pool keeps DuckDB instances. For each statement, views are created over the files that the statement can
need.
"""

from __future__ import annotations

from rankscope_storage.connection.connection import Connection, connect

__all__ = ["Connection", "connect"]
