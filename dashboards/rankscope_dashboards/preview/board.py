"""A board with the data of all its panels, read from a Prometheus."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rankscope_contract.metrics.spec import MetricSpec
from rankscope_dashboards.deploy.prometheus import PrometheusSettings
from rankscope_dashboards.preview.intervals import step_seconds
from rankscope_dashboards.preview.panels import Context, Panel, read_panel, series_name
from rankscope_dashboards.preview.prometheus import PreviewError, Prometheus, QueryError, Window
from rankscope_dashboards.preview.variables import chosen_values
from rankscope_dashboards.provisioning.tree import BOARDS
from rankscope_storage.base.service_catalogue import RUN_END, RUN_LAST_STEP, RUN_START

SCRAPE_SECONDS: Final = PrometheusSettings().scrape_seconds
"""Scrape interval in the data source that is provisioned. Grafana uses it as the lowest step of a query."""

_MOST_MARKS: Final = 100
_SHORTEST: Final = 60.0
"""Shortest range of a run in seconds, so that a run of a few steps has several points."""

_LIFE: Final = 400 * 86_400.0
"""Seconds before now in which a run is looked for. Remote read answers for the whole life of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An annotation: its kind, such as Restarts, its text, and its time in UTC seconds."""

    kind: str
    text: str
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a board: its title and its panels."""

    title: str
    is_folded: bool
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardContent:
    """A board with its data. `variables` has the values in queries."""

    title: str
    description: str
    window: Window
    variables: Mapping[str, str]
    rows: tuple[Row, ...]
    marks: tuple[Mark, ...]
    warnings: tuple[str, ...]


def board_names(tree: Path) -> list[str]:
    """Return the names of the boards in the provisioning files in `tree`."""
    return sorted(path.stem for path in (tree / BOARDS).glob("*.json"))


def read_board(tree: Path, name: str) -> dict[str, Any]:
    """Return the committed JSON of a board. Raises PreviewError, with the names of all boards, if there is none."""
    known = board_names(tree)
    if (stem := name.replace("-", "_")) not in known:
        raise PreviewError(f"there is no board {name!r}: the boards are {', '.join(known)}")
    board: dict[str, Any] = json.loads((tree / BOARDS / f"{stem}.json").read_text(encoding="utf-8"))
    return board


def run_window(prometheus: Prometheus, run: str, now: float) -> Window | None:
    """Return the range of a run, from its first start to its last step, or None if Prometheus does not know it.

    The metrics of the service have this range, also for ended runs of the store, which need the label `job`.
    """
    quoted = json.dumps(run, ensure_ascii=False)
    start = _edge(prometheus, "min", RUN_START, quoted, now)
    if start is None:
        return None
    ends = [_edge(prometheus, "max", metric, quoted, now) for metric in (RUN_LAST_STEP, RUN_END)]
    return Window(start=start, end=max([start + _SHORTEST, *(one for one in ends if one is not None)]))


def _edge(prometheus: Prometheus, how: str, metric: MetricSpec, run: str, now: float) -> float | None:
    over = f"[{_LIFE:.0f}s]"
    live, stored = (f"{how}_over_time({metric.name}{{{job}run={run}}}{over})" for job in ("", 'job="rankscope", '))
    found = prometheus.instant(f"{how}({live} or {stored})", now)
    return found[0].values[0] if found else None


def read_content(
    board: Mapping[str, Any], prometheus: Prometheus, window: Window, given: Mapping[str, Sequence[str]]
) -> BoardContent:
    """Return a board with the results of its queries in `window`. `given` are values of variables by name.

    Raises PreviewError if Prometheus does not answer or does not know a given value.
    """
    variables = chosen_values(board, prometheus, window, given)
    context = Context(prometheus, window, variables, SCRAPE_SECONDS)
    return BoardContent(
        title=board["title"],
        description=board.get("description", ""),
        window=window,
        variables=variables,
        rows=tuple(_rows(board, context)),
        marks=tuple(_marks(board, context)),
        warnings=tuple(sorted(prometheus.warnings)),
    )


def _rows(board: Mapping[str, Any], context: Context) -> list[Row]:
    """Return the rows of a board. Panels before the first row are in a row without a title."""
    found: list[tuple[str, bool, list[Panel]]] = []
    for panel in board["panels"]:
        if panel["type"] == "row":
            inner = [read_panel(one, context) for one in panel.get("panels") or ()]
            found.append((panel["title"], bool(panel.get("collapsed")), inner))
        else:
            if not found:
                found.append(("", False, []))
            found[-1][2].append(read_panel(panel, context))
    return [Row(title=title, is_folded=is_folded, panels=tuple(inner)) for title, is_folded, inner in found if inner]


def _marks(board: Mapping[str, Any], context: Context) -> list[Mark]:
    """Return the enabled annotations of a board. Of consecutive points of a series, the first one is a mark."""
    found = []
    for one in (one for one in board.get("annotations", {}).get("list") or () if one["enable"]):
        least = float(str(one.get("step") or "60s").removesuffix("s"))
        step = step_seconds(context.window, 100, least)
        try:
            listed = context.prometheus.over(context.text(one["expr"], step), context.window, step)
        except QueryError:
            continue  # the panels report rejected queries
        for series in listed:
            text = series_name(series.labels, one.get("titleFormat") or one["name"])
            before = -step
            for time in series.times:
                if time - before > 1.5 * step:
                    found.append(Mark(kind=one["name"], text=text, time=time))
                before = time
    return sorted(found, key=lambda mark: mark.time)[:_MOST_MARKS]
