"""Answer requests for pages from a store: addresses, choices of the reader, and a cache by version of the store.

This module performs no network I/O: the service and `rankscope view` pass it the path and the query of a request.
"""

from __future__ import annotations

import csv
import io
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rankscope_storage.connection import Connection, connect
from rankscope_view.assets import ASSETS, Asset, digest
from rankscope_view.data.curves import Axis, CurveRequest, Smoothing, curve
from rankscope_view.data.detail import RunDetail, read_chart, read_detail
from rankscope_view.data.events import NEWEST, Group, event_lines, event_log, markers
from rankscope_view.data.history import EVAL_LOSS, GRAD_NORM, LOSS
from rankscope_view.data.runs import RunQuery, run_list
from rankscope_view.format import text
from rankscope_view.pages import run as run_page
from rankscope_view.pages import run_list as list_page
from rankscope_view.pages.parts import Place, document

HTML: Final = "text/html; charset=utf-8"
JSON: Final = "application/json"
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:;"
        " base-uri 'none'; form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_IMMUTABLE: Final = {"Cache-Control": "public, max-age=31536000, immutable"}
_PAGE_SECONDS: Final = 5.0
"""Longest time in seconds for which a page is cached, because it contains ages."""

_CACHED: Final = 256

Query = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """Answer to one request."""

    status: int = 200
    type: str = HTML
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: HEADERS)


class NotFoundError(Exception):
    """The store has no object with this name; the text names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request: the segments of its path, its query, and the problems of the service to show."""

    segments: tuple[str, ...]
    query: Query
    alarms: tuple[str, ...] = ()

    @property
    def run(self) -> str:
        """Return the name of the run in the path. The query has the names that cannot be in a path."""
        return self.query.get("run") or self.segments[1]

    def number(self, name: str) -> float | None:
        """Return a finite number of the query, or None."""
        try:
            value = float(self.query.get(name, ""))
        except ValueError:
            return None
        return value if math.isfinite(value) else None

    def count(self, name: str) -> int:
        """Return a number of the query that is not negative, or 0."""
        return max(0, min(int(self.number(name) or 0), 1_000_000_000))


class Site:
    """The pages of the store at `path`, below the prefix `base`. The methods may be called by several threads."""

    def __init__(
        self, path: Path, *, base: str = "", has_service: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._place = Place(base=base, assets=digest(), has_service=has_service)
        self._is_single = has_service  # the threads of DuckDB would slow the flushes of a service
        self._clock = clock
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[Any, ...], tuple[int, float, Response]] = OrderedDict()

    def version(self) -> int:
        """Return the newest version of the store."""
        with connect(self._path, single_threaded=True) as connection:
            return connection.version

    def respond(self, segments: Sequence[str], query: Query, alarms: Sequence[str] = ()) -> Response:
        """Return the answer to the request for the path with these decoded `segments`. Bad requests raise nothing."""
        asked = Asked(segments=tuple(segments), query=query, alarms=tuple(alarms))
        if asked.segments[:1] == ("assets",):
            return _asset(asked.segments[-1])
        with connect(self._path, single_threaded=self._is_single) as connection:
            version = connection.version
            key = (asked.segments, tuple(sorted(query.items())), asked.alarms)
            if known := self._known(key, version):
                return known
            try:
                found = self._answer(connection, asked)
            except NotFoundError as error:
                return self._missing(str(error))
        self._remember(key, version, found)
        return found

    def failure(self, reason: str) -> Response:
        """Return the page which states that a query failed."""
        body = f'<div class="panel blank"><strong>The query failed</strong><p>{text(reason)}</p></div>'
        return Response(status=500, body=document(self._place, "Error", body).encode())

    def _known(self, key: tuple[Any, ...], version: int) -> Response | None:
        with self._lock:
            known = self._cache.get(key)
        is_fresh = known is not None and known[0] == version
        if known is None or not is_fresh or (known[2].type == HTML and self._clock() - known[1] > _PAGE_SECONDS):
            return None
        return known[2]

    def _remember(self, key: tuple[Any, ...], version: int, found: Response) -> None:
        with self._lock:
            self._cache[key] = (version, self._clock(), found)
            self._cache.move_to_end(key)
            while len(self._cache) > _CACHED:
                self._cache.popitem(last=False)

    def _answer(self, connection: Connection, asked: Asked) -> Response:
        match asked.segments:
            case ():
                return self._list(connection, asked)
            case ("runs", _):
                return self._run(connection, asked)
            case ("runs", _, "events"):
                return self._events(connection, asked)
            case ("data", "curve"):
                return _curve(connection, asked)
            case ("data", "curve.csv"):
                return _csv(connection, asked)
        raise NotFoundError(f"There is no page at /{'/'.join(asked.segments)}.")

    def _missing(self, reason: str) -> Response:
        body = f'<div class="panel blank"><strong>Not found</strong><p>{text(reason)}</p></div>'
        return Response(status=404, body=document(self._place, "Not found", body).encode())

    def _list(self, connection: Connection, asked: Asked) -> Response:
        search = asked.query.get("q", "")
        state, sort = asked.query.get("state"), asked.query.get("sort", "")
        found = run_list(connection, RunQuery.parse(search, state=state, sort=sort, page=asked.count("page")))
        place = _live(self._place, is_live=any(row.is_live for row in found.rows))
        return _page(list_page.page(place, found, search, self._clock(), asked.alarms))

    def _detail(self, connection: Connection, asked: Asked) -> tuple[Place, RunDetail]:
        found = read_detail(connection, asked.run)
        if found is None:
            raise NotFoundError(f"The store has no run {asked.run!r}.")
        return _live(self._place, is_live=found.row.is_live), found

    def _run(self, connection: Connection, asked: Asked) -> Response:
        place, found = self._detail(connection, asked)
        choice = chart_choice(asked)
        curves = {name: curve(history, _smaller(choice.request)) for name, history in found.histories.items()}
        log = event_log(found.lines, found.history(LOSS), [found.history(GRAD_NORM)], (), NEWEST)
        return _page(run_page.page(place, found, choice, curves, log))

    def _events(self, connection: Connection, asked: Asked) -> Response:
        place, found = self._detail(connection, asked)
        group = next((one for one in Group if one == asked.query.get("group")), None)
        page = asked.count("page")
        newest = (page + 1) * NEWEST + 1
        log = event_log(found.lines, found.history(LOSS), [found.history(GRAD_NORM)], (group,) if group else (), newest)
        return _page(run_page.events_page(place, found, log, group, page))


def _live(place: Place, *, is_live: bool) -> Place:
    return Place(base=place.base, assets=place.assets, has_service=place.has_service, is_live=is_live)


def _page(html: str) -> Response:
    return Response(body=html.encode("utf-8", "replace"))


def chart_choice(asked: Asked) -> run_page.ChartChoice:
    """Return the choices of the reader for charts, from the query. Unknown values are the default."""
    query = asked.query
    axis = next((one for one in Axis if one == query.get("axis")), Axis.STEP)
    smoothing = next((one for one in Smoothing if one == query.get("smooth")), Smoothing.EMA)
    strength = asked.number("strength")
    request = CurveRequest(
        axis=axis,
        smoothing=smoothing,
        decay=min(max(strength, 0.0), 0.999) if strength is not None and smoothing is Smoothing.EMA else 0.9,
        width=int(min(max(strength, 1), 500)) if strength is not None and smoothing is Smoothing.AVERAGE else 20,
        first=asked.number("from"),
        last=asked.number("to"),
        points=min(max(asked.count("points") or 4000, 8), 100_000),
        newest=asked.count("tail") or None,
    )
    return run_page.ChartChoice(request=request, is_log=bool(query.get("log")), fits_all=bool(query.get("fit")))


def _smaller(request: CurveRequest) -> CurveRequest:
    names = ("axis", "smoothing", "decay", "width", "first", "last")
    return CurveRequest(**{name: getattr(request, name) for name in names}, points=800)


def _curve(connection: Connection, asked: Asked) -> Response:
    """Return the curve of a scalar with its markers as JSON."""
    run, name = asked.query.get("run", ""), asked.query.get("name", LOSS)
    choice = chart_choice(asked)
    history = read_chart(connection, run, name)
    document = curve(history, choice.request).document()
    if asked.query.get("markers"):
        lines, evaluations = event_lines(connection, run), read_chart(connection, run, EVAL_LOSS)
        found = markers(lines, evaluations, history, choice.request.axis)
        document["markers"] = [[one.group, one.x, one.step, one.text, one.is_critical] for one in found]
    return Response(type=JSON, body=json.dumps(document, allow_nan=False).encode())


def _csv(connection: Connection, asked: Asked) -> Response:
    """Return all stored rows of a scalar in the zoom window as CSV."""
    run, name = asked.query.get("run", ""), asked.query.get("name", LOSS)
    history = read_chart(connection, run, name)
    sheet = io.StringIO()
    writer = csv.writer(sheet)
    writer.writerow(("attempt", "step", "cumulative_step", "time", name, "lowest", "highest", "is_superseded"))
    columns = (
        history.attempt,
        history.step,
        history.cumulative,
        history.time,
        history.value,
        history.lowest,
        history.highest,
    )
    writer.writerows(zip(*(column.tolist() for column in columns), (~history.stands).astype(int).tolist(), strict=True))
    disposition = {"Content-Disposition": 'attachment; filename="curve.csv"'}
    return Response(type="text/csv; charset=utf-8", body=sheet.getvalue().encode(), headers={**HEADERS, **disposition})


def _asset(name: str) -> Response:
    found: Asset | None = ASSETS.get(name)
    if found is None:
        return Response(status=404, type="text/plain; charset=utf-8", body=f"there is no asset {name}".encode())
    return Response(type=found.type, body=found.read(), headers={**HEADERS, **_IMMUTABLE})
