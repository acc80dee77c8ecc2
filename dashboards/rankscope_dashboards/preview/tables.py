"""Tables of instant results: one column for each label and for each query, and the transformations of our boards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_dashboards.preview.prometheus import PreviewError, Series
from rankscope_dashboards.preview.units import formatted
from rankscope_dashboards.preview.values import Cell, cell, column_settings

ABSENT: Final = Cell("–")
"""A cell without a value, which is never 0."""

Value = str | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table: headings, and rows with one cell for each heading."""

    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class _Frame:
    """The columns of a table by name, with values of equal number."""

    columns: dict[str, list[Value]]

    @property
    def size(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def rows(self, order: Sequence[int]) -> _Frame:
        return _Frame({name: [column[at] for at in order] for name, column in self.columns.items()})


def table(panel: Mapping[str, Any], results: Mapping[str, Sequence[Series]]) -> Table:
    """Return the table of a panel from the results of its queries by their names. Raises PreviewError."""
    frame = _joined(results)
    for one in panel.get("transformations") or ():
        if one["id"] not in _TRANSFORMATIONS:
            raise PreviewError(f"a preview has no transformation {one['id']!r}")
        frame = _TRANSFORMATIONS[one["id"]](frame, one["options"])
    settings = {name: column_settings(panel, name) for name in frame.columns}
    rows = [
        tuple(_cell(column[at], settings[name]) for name, column in frame.columns.items()) for at in range(frame.size)
    ]
    return Table(headings=tuple(frame.columns), rows=tuple(rows))


def _joined(results: Mapping[str, Sequence[Series]]) -> _Frame:
    """Return one row for each combination of labels, with a column for the value of each query."""
    names = {query: "Value" if len(results) == 1 else f"Value #{query}" for query in results}
    found: dict[tuple[tuple[str, str], ...], dict[str, Value]] = {}
    for query, listed in results.items():
        for one in listed:
            key = tuple(sorted(one.labels.items()))
            found.setdefault(key, {"Time": 1000 * one.times[-1], **one.labels})[names[query]] = one.values[-1]
    labels = sorted({label for key in found for label, _ in key})
    return _Frame({name: [row.get(name) for row in found.values()] for name in ("Time", *labels, *names.values())})


def _merge(frame: _Frame, _options: Mapping[str, Any]) -> _Frame:
    return frame  # the queries are joined already


def _organize(frame: _Frame, options: Mapping[str, Any]) -> _Frame:
    order, names, left_out = (options.get(key) or {} for key in ("indexByName", "renameByName", "excludeByName"))
    kept = [name for name in frame.columns if not left_out.get(name)]
    kept.sort(key=lambda name: order.get(name, len(order)))
    return _Frame({names.get(name) or name: frame.columns[name] for name in kept})


def _convert(frame: _Frame, options: Mapping[str, Any]) -> _Frame:
    columns = dict(frame.columns)
    for one in options["conversions"]:
        name = one["targetField"]
        if one["destinationType"] == "number" and name in columns:
            columns[name] = [_as_number(value) for value in columns[name]]
    return _Frame(columns)


def _as_number(value: Value) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def _sort(frame: _Frame, options: Mapping[str, Any]) -> _Frame:
    for one in options["sort"]:
        if one["field"] in frame.columns:
            column = frame.columns[one["field"]]
            numbers = [(value is not None, value or 0) for value in column]
            frame = frame.rows(sorted(range(frame.size), key=numbers.__getitem__, reverse=bool(one.get("desc"))))
    return frame


def _limit(frame: _Frame, options: Mapping[str, Any]) -> _Frame:
    return frame.rows(range(min(frame.size, int(options["limitField"]))))


def _cell(value: Value, settings: Mapping[str, Any]) -> Cell:
    if value is None or value == "":
        return ABSENT
    if isinstance(value, str):
        return Cell(value)
    if "custom.cellOptions" in settings:
        return cell(value, settings, has_thresholds=True)
    return Cell(formatted(value, settings.get("unit", ""), settings.get("decimals")))


_TRANSFORMATIONS: Final[Mapping[str, Callable[[_Frame, Mapping[str, Any]], _Frame]]] = {
    "merge": _merge,
    "organize": _organize,
    "convertFieldType": _convert,
    "sortBy": _sort,
    "limit": _limit,
}
