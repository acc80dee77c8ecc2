"""Find the views and macros that a statement can need, and whether the statement can modify anything.

This module executes no statement. DuckDB binds a view when it is created. For all views, this takes longer than most
statements. A connection therefore creates only views that a statement names, and the views that these read. Words in
texts and comments of the statement count as names too.

A statement that DuckDB classifies as SELECT can still write. A WITH may contain INSERT, UPDATE, DELETE, TRUNCATE or
COPY TO, and a table function may change a setting of all connections of an instance.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import duckdb

from rankscope_storage.base.datasets import DATASETS
from rankscope_storage.base.errors import QueryError

_CREATES: Final = re.compile(r"CREATE OR REPLACE (?:TEMPORARY )?(?:VIEW|MACRO|FUNCTION) (\w+)")
_WORD: Final = re.compile(r"[a-z_]\w*")
_ALL: Final = re.compile(
    r"^\s*desc\b|\b(?:show|describe|information_schema|query|query_table|sqlite_\w+|duckdb_\w+|pg_\w+)\b|;\s*\S"
)
"""Regular expression that matches a statement for which all views must exist.

Such a statement accesses views without their names, as SHOW does, or contains a second statement."""
_EXPLAIN: Final = re.compile(r"\s*explain(\s+analyze)?\s", re.IGNORECASE)

T = TypeVar("T")


class StatementCache(Generic[T]):
    """Results of an analysis of statements, by their text. The analysis must not depend on a connection."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._found: dict[str, T] = {}

    def find(self, query: str, analyse: Callable[[], T]) -> T:
        """Return the cached result for `query`, or that of `analyse`. The cache is cleared when it is full."""
        try:
            return self._found[query]
        except KeyError:
            if len(self._found) >= self._most:
                self._found.clear()
            return self._found.setdefault(query, analyse())


_only_selects: Final[StatementCache[bool]] = StatementCache()


@dataclass(frozen=True, slots=True)
class Definition:
    """A view or macro: the statement that creates it, and the names of the datasets and views that it reads.

    `datasets` are those of which it reads the raw rows, and `reads` are other views and macros.
    """

    statement: str
    datasets: tuple[str, ...]
    reads: tuple[str, ...]


def definitions(statements: Iterable[str], *, prefix: str) -> Mapping[str, Definition]:
    """Return the views and macros that `statements` create, by name. Each follows the views and macros that it reads.

    The raw rows of a dataset are read from the relation `<prefix><dataset>`.
    """
    found: dict[str, Definition] = {}
    for statement in statements:
        match = _CREATES.match(statement)
        assert match, statement
        words = _words(statement)
        datasets = tuple(dataset for dataset in DATASETS if f"{prefix}{dataset}" in statement)
        read = [name for name in words & found.keys() if not datasets or "VIEW" not in found[name].statement[:40]]
        found[match[1]] = Definition(statement, datasets, tuple(read))
    return found


def needed_definitions(query: str, known: Mapping[str, Definition]) -> list[str]:
    """Return the names in `known` that `query` can need, in an order in which DuckDB can create them."""
    text = query.casefold()
    if _ALL.search(text):
        return list(known)
    needed: set[str] = set()
    found = _words(text) & known.keys()
    while found:
        needed |= found
        found = {name for one in found for name in known[one].reads} - needed
    return [name for name in known if name in needed]


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.casefold()))


_MAY_CHANGE: Final = re.compile(r"\b(?:insert|update|delete|truncate|merge|copy)\b", re.IGNORECASE)
_SETS: Final = re.compile(r"\b(?:enable|disable)_\w+\"?\s*\(", re.IGNORECASE)
_NODE: Final = re.compile(r'"type":\s*"(\w+_NODE)"')  # quotation marks within texts are escaped by a backslash
_READING: Final = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "CTE_NODE", "RECURSIVE_CTE_NODE"})


def can_change(cursor: duckdb.DuckDBPyConnection, query: str) -> bool:
    """Return whether the SELECT `query` could modify tables, files or settings; True if this is unclear."""
    if _SETS.search(query):
        return True
    if not _MAY_CHANGE.search(query):
        return False
    [(tree,)] = cursor.execute("SELECT json_serialize_sql(?)", [query]).fetchall()
    nodes = frozenset(_NODE.findall(tree))
    return not nodes or not nodes <= _READING


def only_selects(cursor: duckdb.DuckDBPyConnection, query: str) -> bool:
    """Return whether `query` does not modify DuckDB.

    Returns True if DuckDB cannot parse the query, because DuckDB then rejects it.
    """

    def analyse() -> bool:
        kinds = _kinds(cursor, query)
        return all(kind == duckdb.StatementType.SELECT for kind in kinds) and not can_change(cursor, query)

    try:
        return _only_selects.find(query, analyse)
    except duckdb.Error:
        return True


def check_selects(cursor: duckdb.DuckDBPyConnection, query: str) -> None:
    """Raise QueryError if `query` is not exactly one statement, or if the statement does more than read."""
    explained = _EXPLAIN.sub("", query, count=1) if _EXPLAIN.match(query) else query
    try:
        kinds = _kinds(cursor, explained)
    except duckdb.Error as error:
        raise QueryError(f"DuckDB cannot parse the statement: {error}") from error
    if kinds != [duckdb.StatementType.SELECT]:
        names = ", ".join(kind.name for kind in kinds) or "an empty text"
        raise QueryError(f"only one SELECT, or EXPLAIN of a SELECT, is permitted here, not {names}")
    if can_change(cursor, explained):
        raise QueryError(
            "only a SELECT that modifies nothing is permitted here: this one may write data or change a setting"
        )


def _kinds(cursor: duckdb.DuckDBPyConnection, query: str) -> list[duckdb.StatementType]:
    return [statement.type for statement in cursor.extract_statements(query)]
