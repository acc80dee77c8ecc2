"""Queries to the HTTP API of Prometheus, as Grafana sends them for a board."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlencode

MOST_POINTS: Final = 11_000
"""Prometheus rejects a query with more points in a series."""


class PreviewError(Exception):
    """The preview cannot be made. The message is one sentence with the cause."""


class QueryError(PreviewError):
    """Prometheus rejected one query. The other panels of a board can still be drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A time range in UTC seconds."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Return the length of the range."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Series:
    """One series of a result: labels without the name of the metric, times in UTC seconds, and values."""

    labels: Mapping[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Prometheus:
    """The HTTP API of one Prometheus. `warnings` has the warnings of all answers so far.

    `fetch` sends GET for a path with a query, and returns the parsed JSON of the answer. It raises PreviewError if
    Prometheus does not answer.
    """

    fetch: Callable[[str], Any]
    warnings: set[str] = field(default_factory=set)

    def instant(self, expression: str, at: float) -> list[Series]:
        """Return the result of `expression` at one time. Raises QueryError if Prometheus rejects it."""
        found = self._data("query", {"query": expression, "time": f"{at:.3f}"})
        if found["resultType"] == "scalar":
            return [_series({}, [found["result"]])]
        return [_series(one["metric"], [one["value"]]) for one in found["result"]]

    def over(self, expression: str, window: Window, step: float) -> list[Series]:
        """Return the result of `expression` at multiples of `step` seconds. Raises QueryError if it is rejected."""
        start, end = (math.floor(edge / step) * step for edge in (window.start, window.end))
        given = {"query": expression, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        return [_series(one["metric"], one["values"]) for one in self._data("query_range", given)["result"]]

    def label_values(self, selector: str, label: str, window: Window) -> set[str]:
        """Return the values of `label` of the series that `selector` selects in the range.

        Prometheus returns series of remote storage, but no label values.
        """
        given = {"match[]": selector, "start": f"{window.start:.3f}", "end": f"{window.end:.3f}"}
        return {one[label] for one in self._data("series", given) if label in one}

    def _data(self, path: str, given: Mapping[str, str]) -> Any:
        answer = self.fetch(f"/api/v1/{path}?{urlencode(given)}")
        if answer.get("status") != "success":
            raise QueryError(f"Prometheus rejected the query: {answer.get('error', 'no reason given')}")
        self.warnings.update(one for one in answer.get("warnings", ()) if one != "not implemented")
        return answer["data"]


def _series(labels: Mapping[str, str], samples: Sequence[Sequence[Any]]) -> Series:
    kept = {name: value for name, value in labels.items() if name != "__name__"}
    return Series(kept, tuple(float(time) for time, _ in samples), tuple(float(value) for _, value in samples))
