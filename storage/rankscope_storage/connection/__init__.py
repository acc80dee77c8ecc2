"""Query a store in SQL: `connect` opens it, and a `Connection` shows its newest version in every statement.

Internally, a pool keeps DuckDB instances, and views are bound per statement to the files that it can need.
"""

from __future__ import annotations

from rankscope_storage.connection.connection import Connection, connect

__all__ = ["Connection", "connect"]
