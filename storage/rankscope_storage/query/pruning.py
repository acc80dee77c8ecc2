"""Find the rows that a statement reads from a store, as far as its text proves it. This module does no I/O.

DuckDB opens the footer of every file of a view before it skips any file. With a thousand files, this is most of the
time of a query. Files are therefore selected before DuckDB runs the query. The selection uses the conditions on run,
attempt and step under which the statement reads a view. A condition that this module does not understand selects all
rows. A statement that reads, or could read, anything except the views of the store is not analysed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_storage.base.datasets import DATASETS, DIMENSIONS
from rankscope_storage.log.snapshot import RowRanges

Node = Mapping[str, Any]
Term = str | int | None

RUN_MACROS: Final = frozenset({"scalar_curve", "top_deviations", "bucket_deviations"})
"""Table macros that read only rows of one run, which is their first parameter, `of_run`."""

RELATION_MACROS: Final = frozenset({"downsample", "ema", "moving_average", "p10"})
"""Table macros whose first argument is the name of the relation that they read."""

_PURE_FUNCTIONS: Final = frozenset({"range", "generate_series", "unnest"})
_RUN: Final = "run"
_INTEGERS: Final = ("attempt", "step")
_MIRRORED: Final = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "="}
_COMPARISONS: Final = {
    "COMPARE_EQUAL": "=",
    "COMPARE_LESSTHAN": "<",
    "COMPARE_GREATERTHAN": ">",
    "COMPARE_LESSTHANOREQUALTO": "<=",
    "COMPARE_GREATERTHANOREQUALTO": ">=",
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a statement, identified by its name or by its position from 1."""

    name: str


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of `column` with `terms`.

    With several terms, `comparison` is =, and the column must equal one of them.
    """

    column: str
    comparison: str
    terms: tuple[Term | Parameter, ...]


@dataclass(frozen=True, slots=True)
class ViewReference:
    """A view or macro that a statement reads, and conditions that all needed rows of the view satisfy."""

    name: str
    conditions: tuple[Condition, ...] = ()


_OwnedCondition = tuple[tuple[str, ...], Condition]
"""A condition, and the name of the table that qualifies its column; the name is empty for an unqualified column."""


class _NotUnderstoodError(Exception):
    """The statement reads something other than views of the store, or in a way that this module does not analyse."""


def view_references(statements: Sequence[Node], known: Iterable[str]) -> tuple[ViewReference, ...] | None:
    """Return all references of a statement to views of the store; None if this module cannot analyse the statement.

    `statements` is the result of DuckDB's `json_serialize_sql`; `known` has the names of the views and macros of the
    store.
    """
    if len(statements) != 1:
        return None
    reader = _Reader(frozenset(known))
    try:
        reader.read(statements[0])
    except (_NotUnderstoodError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return None
    return tuple(reader.found)


def row_ranges(reference: ViewReference, parameters: object) -> RowRanges:
    """Return the ranges of rows that `reference` can need. `parameters` are the values passed with the statement.

    A column without a condition has an unlimited range.
    """
    runs: frozenset[str] | None = None
    ranges = dict.fromkeys(_INTEGERS, (-math.inf, math.inf))
    for condition in reference.conditions:
        values: list[Any] = [_value(term, parameters) for term in condition.terms]
        if condition.column == _RUN and condition.comparison == "=":
            if all(type(value) is str for value in values):  # str() of a subclass may return another text
                named = frozenset(values)
                runs = named if runs is None else runs & named
        elif condition.column in ranges and all(type(value) is int for value in values):
            low, high = ranges[condition.column]
            if condition.comparison in {"=", ">", ">="}:
                low = max(low, min(values))
            if condition.comparison in {"=", "<", "<="}:
                high = min(high, max(values))
            ranges[condition.column] = low, high
    if reference.name not in DATASETS or reference.name in DIMENSIONS:
        return RowRanges(runs)  # rows of such a view can depend on rows of other steps, but never of other runs
    return RowRanges(runs, ranges["attempt"], ranges["step"])


def _value(term: Term | Parameter, parameters: object) -> object:
    if not isinstance(term, Parameter):
        return term
    if isinstance(parameters, Mapping):
        return parameters.get(term.name)
    if isinstance(parameters, Sequence) and not isinstance(parameters, str) and term.name.isdecimal():
        position = int(term.name) - 1
        return parameters[position] if 0 <= position < len(parameters) else None
    return None


class _Reader:
    """One traversal of the syntax tree of a statement; `found` collects the references to views."""

    def __init__(self, known: frozenset[str]) -> None:
        self._known = known
        self._named: set[str] = set()
        self.found: list[ViewReference] = []

    def read(self, tree: Node) -> None:
        self._named = {name.casefold() for name in _with_names(tree)}
        if self._named & self._known:
            raise _NotUnderstoodError  # a name in WITH hides one of our views
        self._walk(tree)

    def _walk(self, tree: Any) -> None:
        unread = [tree]
        while unread:
            node = unread.pop()
            if isinstance(node, list):
                unread += node[::-1]
            elif isinstance(node, dict):
                if node.get("type") == "SELECT_NODE":
                    self._select(node)
                else:
                    unread += reversed(node.values())

    def _select(self, node: Node) -> None:
        where = list(_conditions(node.get("where_clause")))
        if node.get("sample"):
            where = []
        self._table(node.get("from_table", {"type": "EMPTY"}), where, is_only=True)
        self._walk([value for key, value in node.items() if key != "from_table"])

    def _table(self, table: Node, where: Sequence[_OwnedCondition], *, is_only: bool) -> None:
        match table["type"]:
            case "BASE_TABLE":
                self._base(table, where, is_only=is_only)
            case "JOIN":
                self._join(table, where)
            case "SUBQUERY":
                self._walk(table["subquery"])
            case "TABLE_FUNCTION":
                self._function(table["function"])
            case "EXPRESSION_LIST":
                self._walk(table["values"])
            case "EMPTY":
                pass
            case _:
                raise _NotUnderstoodError

    def _base(self, table: Node, where: Sequence[_OwnedCondition], *, is_only: bool) -> None:
        path = [part.casefold() for part in table["qualified_name"]["path"]]
        if path[0] in self._named and len(path) == 1:
            return
        if len(path) != 1 or path[0] not in self._known:
            raise _NotUnderstoodError
        alias = table.get("alias", path[0]).casefold()
        if {"sample", "column_name_alias", "at_clause"} & table.keys():
            where = ()
        conditions = (condition for owner, condition in where if owner == (alias,) or (not owner and is_only))
        self.found.append(ViewReference(path[0], tuple(conditions)))

    def _join(self, table: Node, where: Sequence[_OwnedCondition]) -> None:
        # WHERE is applied after the join and rejects null: it can also be applied before, even for an optional side.
        simple = table.get("join_type") in {"INNER", "LEFT"} and table.get("ref_type") in {"REGULAR", "CROSS"}
        for side in ("left", "right"):
            self._table(table[side], where if simple else (), is_only=False)
        self._walk([value for key, value in table.items() if key not in {"left", "right"}])

    def _function(self, function: Node) -> None:
        name = function["function_name"].casefold()
        arguments = function.get("arguments", [])
        if len(function["qualified_name"]["path"]) != 1:
            raise _NotUnderstoodError
        if name in RUN_MACROS:
            term = _term(arguments[0]["expression"]) if "name" not in arguments[0] else None
            self.found.append(ViewReference(name, () if term is None else (Condition(_RUN, "=", (term,)),)))
        elif name in RELATION_MACROS:
            if "name" in arguments[0]:
                raise _NotUnderstoodError  # the relation may be another argument
            self.found.append(ViewReference(name))
            self._relation(arguments[0]["expression"])
        elif name not in _PURE_FUNCTIONS:
            raise _NotUnderstoodError
        self._walk(arguments)

    def _relation(self, expression: Node) -> None:
        if expression["class"] != "COLUMN_REF" or len(expression["column_names"]) != 1:
            raise _NotUnderstoodError
        name = expression["column_names"][0].casefold()
        if name in self._known:
            self.found.append(ViewReference(name))
        elif name not in self._named:
            raise _NotUnderstoodError


def _with_names(tree: Node) -> Iterator[str]:
    """Yield every name that a WITH clause in the syntax tree defines, in any scope."""
    unread: list[Any] = [tree]
    while unread:
        node = unread.pop()
        if isinstance(node, list):
            unread += node
        elif isinstance(node, dict):
            for entry in (node.get("cte_map") or {}).get("map", []):
                yield entry["key"]
            if node.get("type") in {"CTE_NODE", "RECURSIVE_CTE_NODE"}:
                yield node["cte_name"]
            unread += node.values()


def _conditions(where: Any) -> Iterator[_OwnedCondition]:
    """Yield conditions that every row must satisfy for `where` to be true, each with the table of its column."""
    if not isinstance(where, dict):
        return
    kind = where.get("type")
    if kind == "CONJUNCTION_AND":
        for child in where["children"]:
            yield from _conditions(child)
    elif kind in _COMPARISONS:
        comparison = _COMPARISONS[kind]
        yield from _condition(where["left"], comparison, [where["right"]])
        yield from _condition(where["right"], _MIRRORED[comparison], [where["left"]])
    elif kind == "COMPARE_IN":
        yield from _condition(where["children"][0], "=", where["children"][1:])
    elif kind == "COMPARE_BETWEEN":
        yield from _condition(where["input"], ">=", [where["lower"]])
        yield from _condition(where["input"], "<=", [where["upper"]])


def _condition(column: Node, comparison: str, others: Sequence[Node]) -> Iterator[_OwnedCondition]:
    if column.get("type") != "COLUMN_REF" or not others:
        return
    *owner, name = (part.casefold() for part in column["column_names"])
    terms = tuple(_term(other) for other in others)
    if len(owner) <= 1 and (name == _RUN or name in _INTEGERS) and None not in terms:
        yield tuple(owner), Condition(name, comparison, terms)


def _term(node: Node) -> Term | Parameter:
    """Return the text, the integer or the parameter that `node` of the syntax tree represents.

    None for any other node.
    """
    if node.get("type") == "VALUE_PARAMETER":
        return Parameter(node["identifier"])
    literal = node.get("literal", {}) if node.get("type") == "VALUE_CONSTANT" else {}
    if literal.get("kind") == "STRING":
        return str(literal["text"])
    if literal.get("kind") == "INTEGER":
        return int(literal["text"])
    return None
