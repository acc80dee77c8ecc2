"""Whether a statement that DuckDB calls a SELECT changes something all the same. Reads its text, runs nothing of it.

A WITH may hold INSERT, UPDATE, DELETE, TRUNCATE or COPY TO, and a table function may set what holds for every
connection of an instance.
"""

from __future__ import annotations

import re
from typing import Final

import duckdb

_MAY_CHANGE: Final = re.compile(r"\b(?:insert|update|delete|truncate|merge|copy)\b", re.IGNORECASE)
_SETS: Final = re.compile(r"\b(?:enable|disable)_\w+\"?\s*\(", re.IGNORECASE)
_NODE: Final = re.compile(r'"type":\s*"(\w+_NODE)"')  # a quotation mark within a text is written with a backslash
_READING: Final = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "CTE_NODE", "RECURSIVE_CTE_NODE"})


def changes(cursor: duckdb.DuckDBPyConnection, query: str) -> bool:
    """Whether the SELECT `query` could change tables, files or settings; also when that cannot be told."""
    if _SETS.search(query):
        return True
    if not _MAY_CHANGE.search(query):
        return False
    [(tree,)] = cursor.execute("SELECT json_serialize_sql(?)", [query]).fetchall()
    nodes = frozenset(_NODE.findall(tree))
    return not nodes or not nodes <= _READING
