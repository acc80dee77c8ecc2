"""Querying a store in SQL: `connect` opens it, and a `Connection` shows its newest version in every statement.

Below it are the pool of DuckDB instances and the views that show each statement only the files that it can need.
"""

from __future__ import annotations

from rankscope_storage.connection.connection import Connection, connect

__all__ = ["Connection", "connect"]
