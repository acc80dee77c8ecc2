"""What a statement reads of a store, as far as its text proves it. Pure: a syntax tree in, conditions out.

DuckDB opens the footer of every file a view lists before it skips any; with a thousand files that is most of the time
of a question. So the files are chosen before: by the conditions on run, attempt and step under which a statement
mentions a view. Whatever is not plainly understood counts as "any row"; a statement that reads something else than our
views, or could, is not understood at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.model.schema import DATASETS, DIMENSIONS
from rankscope_storage.log.snapshot import RowRanges

Node = Mapping[str, Any]
Term = str | int | None

RUN_MACROS: Final = frozenset({"scalar_curve", "top_deviations", "bucket_deviations"})
"""Table macros that read only the run in their first parameter, `of_run`."""

RELATION_MACROS: Final = frozenset({"downsample", "ema", "moving_average", "p10"})
"""Table macros over the relation that their first argument names."""

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
    """A value that comes with the statement, by its name or its position from 1."""

    name: str


@dataclass(frozen=True, slots=True)
class Condition:
    """`column` compares with one of `terms`; with more than one the comparison is =."""

    column: str
    comparison: str
    terms: tuple[Term | Parameter, ...]


@dataclass(frozen=True, slots=True)
class ViewReference:
    """A view or macro, and conditions that all its rows which can matter fulfil."""

    name: str
    conditions: tuple[Condition, ...] = ()


class _NotUnderstoodError(Exception):
    """The statement reads something else, or in a way that is not known here."""


def mentions(statements: Sequence[Node], known: Iterable[str]) -> tuple[ViewReference, ...] | None:
    """Return what the one statement reads, each mention apart; None when it is not understood.

    `statements` are what DuckDB's `json_serialize_sql` made of the text; `known` are our views and macros.
    """
    if len(statements) != 1:
        return None
    reader = _Reader(frozenset(known))
    try:
        reader.read(statements[0])
    except (_NotUnderstoodError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return None
    return tuple(reader.found)


def bounds(mention: ViewReference, parameters: object) -> RowRanges:
    """Return the rows that `mention` can need with these `parameters`; what its dataset does not tell is any."""
    runs: frozenset[str] | None = None
    ranges = dict.fromkeys(_INTEGERS, (-math.inf, math.inf))
    for condition in mention.conditions:
        values = [_value(term, parameters) for term in condition.terms]
        if condition.column == _RUN and condition.comparison == "=":
            if all(type(value) is str for value in values):  # what is derived from str may say another text than it is
                named = frozenset(map(str, values))
                runs = named if runs is None else runs & named
        elif condition.column in ranges and all(_is_integer(value) for value in values):
            ranges[condition.column] = _narrowed(ranges[condition.column], condition.comparison, values)
    if mention.name not in DATASETS or mention.name in DIMENSIONS:
        return RowRanges(
            runs
        )  # what such a view shows of one step may come from rows of others, but never of other runs
    return RowRanges(runs, ranges["attempt"], ranges["step"])


def _narrowed(range_: tuple[float, float], comparison: str, values: Sequence[Any]) -> tuple[float, float]:
    low, high = range_
    if comparison in {"=", ">", ">="}:
        low = max(low, *values) if len(values) == 1 else max(low, min(values))
    if comparison in {"=", "<", "<="}:
        high = min(high, *values) if len(values) == 1 else min(high, max(values))
    return low, high


def _is_integer(value: object) -> bool:
    return type(value) is int


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
    """One walk over a syntax tree."""

    def __init__(self, known: frozenset[str]) -> None:
        self._known = known
        self._named: set[str] = set()
        self.found: list[ViewReference] = []

    def read(self, tree: Node) -> None:
        self._named = {name.casefold() for name in _with_names(tree)}
        if self._named & self._known:
            raise _NotUnderstoodError  # it hides one of our views
        self._walk(tree)

    def _walk(self, node: Any) -> None:
        if isinstance(node, list):
            for member in node:
                self._walk(member)
        elif isinstance(node, dict):
            if node.get("type") == "SELECT_NODE":
                self._select(node)
            else:
                self._walk(list(node.values()))

    def _select(self, node: Node) -> None:
        where = list(_conditions(node.get("where_clause")))
        if node.get("sample"):
            where = []
        self._table(node.get("from_table", {"type": "EMPTY"}), where, alone=True)
        self._walk([value for key, value in node.items() if key != "from_table"])

    def _table(self, table: Node, where: Sequence[tuple[tuple[str, ...], Condition]], *, alone: bool) -> None:
        read: dict[str, Callable[[], None]] = {
            "BASE_TABLE": lambda: self._base(table, where, alone=alone),
            "JOIN": lambda: self._join(table, where),
            "SUBQUERY": lambda: self._walk(table["subquery"]),
            "TABLE_FUNCTION": lambda: self._function(table["function"]),
            "EXPRESSION_LIST": lambda: self._walk(table["values"]),
            "EMPTY": lambda: None,
        }
        if table["type"] not in read:
            raise _NotUnderstoodError
        read[table["type"]]()

    def _base(self, table: Node, where: Sequence[tuple[tuple[str, ...], Condition]], *, alone: bool) -> None:
        path = [part.casefold() for part in table["qualified_name"]["path"]]
        if path[0] in self._named and len(path) == 1:
            return
        if len(path) != 1 or path[0] not in self._known:
            raise _NotUnderstoodError
        called = table.get("alias", path[0]).casefold()
        plain = not {"sample", "column_name_alias", "at_clause"} & table.keys()
        self.found.append(
            ViewReference(
                path[0],
                tuple(
                    condition for owner, condition in where if plain and (owner == (called,) or (not owner and alone))
                ),
            )
        )

    def _join(self, table: Node, where: Sequence[tuple[tuple[str, ...], Condition]]) -> None:
        # WHERE comes after the join and refuses null, so it may come before it as well; also where a side is optional.
        simple = table.get("join_type") in {"INNER", "LEFT"} and table.get("ref_type") in {"REGULAR", "CROSS"}
        for side in ("left", "right"):
            self._table(table[side], where if simple else (), alone=False)
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
                raise _NotUnderstoodError  # the relation may be another one
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


def _with_names(node: Any) -> Iterator[str]:
    """Yield every name that a WITH in the tree gives, wherever it holds."""
    if isinstance(node, list):
        for member in node:
            yield from _with_names(member)
    elif isinstance(node, dict):
        for entry in (node.get("cte_map") or {}).get("map", []):
            yield entry["key"]
        if node.get("type") in {"CTE_NODE", "RECURSIVE_CTE_NODE"}:
            yield node["cte_name"]
        yield from _with_names(list(node.values()))


def _conditions(where: Any) -> Iterator[tuple[tuple[str, ...], Condition]]:
    """Yield what all of `where` being true implies, with the table the column was said to be of."""
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


def _condition(column: Node, comparison: str, others: Sequence[Node]) -> Iterator[tuple[tuple[str, ...], Condition]]:
    if column.get("type") != "COLUMN_REF" or not others:
        return
    *owner, name = (part.casefold() for part in column["column_names"])
    terms = tuple(_term(other) for other in others)
    if len(owner) <= 1 and (name == _RUN or name in _INTEGERS) and None not in terms:
        yield tuple(owner), Condition(name, comparison, terms)


def _term(node: Node) -> Term | Parameter:
    """Return the text, integer or parameter that `node` is, None for anything else."""
    if node.get("type") == "VALUE_PARAMETER":
        return Parameter(node["identifier"])
    literal = node.get("literal", {}) if node.get("type") == "VALUE_CONSTANT" else {}
    if literal.get("kind") == "STRING":
        return str(literal["text"])
    if literal.get("kind") == "INTEGER":
        return int(literal["text"])
    return None
