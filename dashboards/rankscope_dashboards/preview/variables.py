"""Variables of a board: their lists of values, the chosen values, and their place in a query."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rankscope_dashboards.preview.intervals import time_variables
from rankscope_dashboards.preview.prometheus import PreviewError, Prometheus, Window

_VARIABLE: Final = re.compile(r"\$(\w+)|\$\{(\w+)(?::\w+)?\}")
_LABEL_VALUES: Final = re.compile(r"label_values\((.+), *(\w+)\)")
_QUERY_RESULT: Final = re.compile(r"query_result\((.+)\)")
_SHOWN: Final = 8


def interpolated(text: str, values: Mapping[str, str]) -> str:
    """Return `text` with the values of variables, written as `$name` or `${name}`. Unknown ones remain."""
    return _VARIABLE.sub(lambda found: values.get(found[1] or found[2], found[0]), text)


def chosen_values(
    board: Mapping[str, Any], prometheus: Prometheus, window: Window, given: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return the text of each variable in queries, from `given` or as Grafana chooses it when a board is opened.

    Grafana chooses All where a variable has it, otherwise the `current` value of the board, and otherwise the first
    value of a queried list. A list in the board is not queried: without `current`, its value is empty. Raises
    PreviewError if a given value is not in the list, or if the board has no such variable.
    """
    variables = [one for one in board["templating"]["list"] if one["type"] not in {"datasource", "constant"}]
    names = [one["name"] for one in variables]
    if unknown := [name for name in given if name not in names]:
        raise PreviewError(f"the board has no variable {unknown[0]!r}: its variables are {', '.join(names)}")
    values: dict[str, str] = {}
    for variable in variables:
        listed = _listed(variable, prometheus, window, values)
        values[variable["name"]] = _value(variable, listed, given.get(variable["name"], ()))
    return values


def _listed(
    variable: Mapping[str, Any], prometheus: Prometheus, window: Window, values: Mapping[str, str]
) -> list[str]:
    """Return the values of the list of a variable, in its order."""
    if variable["type"] == "custom":
        return [one.strip() for one in variable["query"].split(",")]
    text = interpolated(variable["query"], {**values, **time_variables(window, 1.0, 1.0)})
    if result := _QUERY_RESULT.fullmatch(text):
        return [name for one in prometheus.instant(result[1], window.end) for name in one.labels.values()]
    query = _LABEL_VALUES.fullmatch(text)
    if query is None:
        raise PreviewError(f"the query of the variable {variable['name']!r} is not supported: {variable['query']}")
    return _sorted(prometheus.label_values(query[1], query[2], window), variable.get("sort") or 0)


def _sorted(values: Iterable[str], order: int) -> list[str]:
    """Return values in one of Grafana's orders: 1 and 2 alphabetical, 3 and 4 by numbers, 5 and 6 without case.

    Even numbers are descending orders.
    """
    if order in {3, 4}:
        return sorted(sorted(values), key=_first_number, reverse=order == 4)
    return sorted(values, key=str.casefold if order in {5, 6} else str, reverse=order in {2, 4, 6})


def _first_number(text: str) -> float:
    found = re.search(r"\d+", text)
    return float(found[0]) if found else -1.0


def _value(variable: Mapping[str, Any], listed: Sequence[str], given: Sequence[str]) -> str:
    name, has_several = variable["name"], bool(variable.get("multi") or variable.get("includeAll"))
    if len(given) > 1 and not has_several:
        raise PreviewError(f"the variable {name!r} of this board has one value: {', '.join(given)} are too many")
    for one in given:
        if one not in listed:
            known = ", ".join(listed[:_SHOWN]) + (", …" if len(listed) > _SHOWN else "")
            choice = f"choose one of {known}" if known else "Prometheus has none"
            raise PreviewError(f"unknown {name} {one!r} in the time range: {choice}")
    if not given and (every := variable.get("allValue")):
        return str(every)
    stored = [one for one in listed if one == variable.get("current", {}).get("value")]
    first = [] if variable["type"] == "custom" else listed[:1]
    chosen = given or stored or (listed if variable.get("includeAll") else first)
    if not has_several:
        return _quoted(chosen[0]) if chosen else ""
    escaped = [_quoted(re.sub(r"([\\^$.|?*+(){}\[\]])", r"\\\1", one)) for one in chosen]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"


def _quoted(value: str) -> str:
    """Return a value for a string in double quotes in PromQL."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
