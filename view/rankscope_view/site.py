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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rankscope_contract.model.kinds import OPS
from rankscope_storage.api.summaries import AnomalyRow, anomalies
from rankscope_storage.connection import Connection, connect
from rankscope_view.assets import ASSETS, Asset, digest
from rankscope_view.data.comparison import compare
from rankscope_view.data.curves import Axis, Curve, CurveRequest, Smoothing, curve
from rankscope_view.data.detail import RunDetail, read_chart, read_detail
from rankscope_view.data.events import NEWEST, EventLog, Group, event_lines, event_log, markers
from rankscope_view.data.grid import GridRequest, TensorKinds, cell_value, tensor_grid, tensor_kinds
from rankscope_view.data.history import EVAL_LOSS, GRAD_NORM, LOSS
from rankscope_view.data.incidents import incidents
from rankscope_view.data.ranks import rank_grid, rank_table
from rankscope_view.data.runs import RunQuery, RunRow, known_runs, run_list, run_row
from rankscope_view.data.tensor import first_to_leave, tensor_detail, tensor_history
from rankscope_view.format import text
from rankscope_view.pages import compare as compare_page
from rankscope_view.pages import incident as incident_page
from rankscope_view.pages import ranks as rank_page
from rankscope_view.pages import run as run_page
from rankscope_view.pages import run_list as list_page
from rankscope_view.pages import tensors as tensor_page
from rankscope_view.pages.parts import Place, document

HTML: Final = "text/html; charset=utf-8"
JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"
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
            case ("runs", _, "tensors"):
                return self._tensors(connection, asked)
            case ("runs", _, "ranks"):
                return self._ranks(connection, asked)
            case ("runs", _, "incidents", *_):
                return self._incidents(connection, asked)
            case ("compare",):
                return self._compare(connection, asked)
            case ("data", "grid"):
                return _grid(connection, asked)
            case ("data", "ranks"):
                return _rank_grid(connection, asked)
            case ("data", "cell"):
                return _cell(connection, asked)
            case ("data", "compare"):
                return _compared(connection, asked)
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
        log = _log(found)
        return _page(run_page.page(place, found, choice, curves, log))

    def _events(self, connection: Connection, asked: Asked) -> Response:
        place, found = self._detail(connection, asked)
        group = next((one for one in Group if one == asked.query.get("group")), None)
        page = asked.count("page")
        newest = (page + 1) * NEWEST + 1
        log = _log(found, groups=(group,) if group else (), newest=newest)
        return _page(run_page.events_page(place, found, log, group, page))

    def _row(self, connection: Connection, asked: Asked) -> tuple[Place, RunRow]:
        row = run_row(connection, asked.run)
        if row is None:
            raise NotFoundError(f"The store has no run {asked.run!r}.")
        return _live(self._place, is_live=row.is_live), row

    def _tensors(self, connection: Connection, asked: Asked) -> Response:
        place, row = self._row(connection, asked)
        kinds = tensor_kinds(connection, row.run)
        choice = tensor_choice(asked, kinds)
        detail, drawn = None, None
        leaving = first_to_leave(connection, row.run)
        if choice is not None:
            name = choice.tensor or next((one["tensor"] for one in leaving if one["kind"] == choice.kind), None)
            if name is not None:
                detail = tensor_detail(connection, row.run, choice.kind, choice.op, name)
                history = tensor_history(connection, row.run, choice.kind, choice.op, name)
                drawn = curve(history, CurveRequest(axis=Axis.ARRIVAL, smoothing=Smoothing.NONE, points=800))
        return _page(tensor_page.page(place, row, kinds, choice, detail=detail, curve=drawn, leaving=leaving))

    def _ranks(self, connection: Connection, asked: Asked) -> Response:
        place, row = self._row(connection, asked)
        return _page(rank_page.page(place, row, rank_table(connection, row.run), self._clock()))

    def _incidents(self, connection: Connection, asked: Asked) -> Response:
        place, row = self._row(connection, asked)
        found = incidents(connection, [row.run]).get(row.run, [])
        if len(asked.segments) == 3:
            return _page(incident_page.list_page(place, row, found))
        one = next((one for one in found if one.key == asked.segments[3]), None)
        if one is None:
            raise NotFoundError(f"The run {row.run!r} has no incident {asked.segments[3]!r}.")
        steps = incident_page.window(one)
        listed = anomalies(connection, row.run, top=1_000_000, steps=steps)
        own = [each for each in listed if (each.attempt or 0) == (one.attempt or 0)]
        absent = unmeasured(connection, row.run, steps)
        shown = first_of_each(own)[: incident_page.SHOWN]
        return _page(incident_page.page(place, row, one, shown, total=len(own), not_measured=absent))

    def _compare(self, connection: Connection, asked: Asked) -> Response:
        a, b = asked.query.get("a") or asked.query.get("run"), asked.query.get("b")
        if not a or not b:
            others = [row["run"] for row in known_runs(connection)][:1000]
            return _page(compare_page.choose_page(self._place, a, sorted(others)))
        found = compare(connection, a, b)
        if found is None:
            raise NotFoundError(f"The store does not have both runs {a!r} and {b!r}.")
        curves = [both_curves(connection, a, b, name, CurveRequest(points=800)) for name in compare_page.CHARTS]
        return _page(compare_page.page(self._place, found, curves))


def _log(found: RunDetail, groups: Sequence[Group] = (), newest: int = NEWEST) -> EventLog:
    others = [found.history(GRAD_NORM)]
    return event_log(found.lines, found.history(LOSS), others, found.history(EVAL_LOSS), groups=groups, newest=newest)


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


def tensor_choice(asked: Asked, kinds: TensorKinds) -> tensor_page.TensorChoice | None:
    """Return the choices of the reader for tensors; None if the run has no statistics of tensors."""
    query = asked.query
    kind = query.get("kind") if query.get("kind") in kinds.counts else kinds.default
    if kind is None:
        return None
    return tensor_page.TensorChoice(
        kind=kind,
        op=query["op"] if query.get("op") in OPS else "norm",
        is_relative=not query.get("absolute"),
        worst_first=query.get("order") == "worst",
        search=query.get("q", ""),
        tensor=query.get("tensor"),
        rows=query.get("rows"),
        columns=query.get("columns"),
    )


def first_of_each(found: Sequence[AnomalyRow]) -> list[AnomalyRow]:
    """Return the first anomaly of each tensor, rank and rule, in the same order."""
    first: dict[tuple[Any, ...], AnomalyRow] = {}
    for row in found:
        first.setdefault((row.tensor or row.op, row.rule, row.rank), row)
    return list(first.values())


def unmeasured(connection: Connection, run: str, steps: tuple[int, int]) -> list[str]:
    """Return the families of quantities without a row in the closed range `steps`."""
    source = connection.relation("tensor_stats", run=run, steps=steps)
    rows = connection.query(
        f"SELECT DISTINCT kind FROM {source} WHERE run = $run AND step BETWEEN $first AND $last",
        {"run": run, "first": steps[0], "last": steps[1]},
    )
    kinds = rows["kind"].to_pylist()
    families = {
        "activations": "act_",
        "gradients": "grad_",
        "weights": "param_",
        "optimizer state": ("exp_avg", "momentum"),
    }
    return [name for name, prefix in families.items() if not any(kind.startswith(prefix) for kind in kinds)]


def both_curves(connection: Connection, a: str, b: str, name: str, request: CurveRequest) -> Curve:
    """Return the curves of a scalar of two runs as the lines A and B of one curve, on the axis of steps."""
    first, second = (curve(read_chart(connection, run, name), request) for run in (a, b))
    lines = [replace(line, label=label) for one, label in ((first, "A"), (second, "B")) for line in one.lines]
    extents = [one.extent for one in (first, second) if one.extent is not None]
    bulks = [one.bulk for one in (first, second) if one.bulk is not None]
    return replace(
        first,
        lines=tuple(lines),
        nonfinite=first.nonfinite + second.nonfinite,
        restarts=(),
        rows=first.rows + second.rows,
        extent=(min(one[0] for one in extents), max(one[1] for one in extents)) if extents else None,
        bulk=(min(one[0] for one in bulks), max(one[1] for one in bulks)) if bulks else None,
    )


def _compared(connection: Connection, asked: Asked) -> Response:
    request = replace(chart_choice(asked).request, axis=Axis.STEP)
    found = both_curves(
        connection, asked.query.get("a", ""), asked.query.get("b", ""), asked.query.get("name", LOSS), request
    )
    return _json(found.document())


def _pair(text_: str | None) -> tuple[int, int] | None:
    """Return the numbers of a range such as `3-17`; None without a valid range."""
    first, _, last = (text_ or "").partition("-")
    return (int(first), int(last)) if first.isdecimal() and last.isdecimal() and len(text_ or "") < 40 else None


def _grid(connection: Connection, asked: Asked) -> Response:
    run = asked.query.get("run", "")
    choice = tensor_choice(asked, TensorKinds(counts={asked.query.get("kind", ""): 0}))
    assert choice is not None
    request = GridRequest(
        kind=choice.kind,
        op=choice.op,
        is_relative=choice.is_relative,
        worst_first=choice.worst_first,
        words=tuple(choice.search.lower().split()),
        rows=_pair(choice.rows),
        columns=_pair(choice.columns),
    )
    return Response(type=BYTES, body=tensor_grid(connection, run, request).encoded())


def _rank_grid(connection: Connection, asked: Asked) -> Response:
    run = asked.query.get("run", "")
    found = rank_grid(connection, run, rank_table(connection, run), whole_step=bool(asked.query.get("whole")))
    return Response(type=BYTES, body=found.encoded())


def _cell(connection: Connection, asked: Asked) -> Response:
    query = asked.query
    steps = (asked.count("first"), asked.count("last"))
    found = cell_value(
        connection,
        query.get("run", ""),
        query.get("kind", ""),
        op=query.get("op", "norm"),
        tensor=query.get("tensor", ""),
        attempt=asked.count("attempt"),
        steps=steps,
    )
    if found is None:
        return _json(None)
    value = None if found.value is None or not math.isfinite(found.value) else found.value
    return _json(asdict(found) | {"value": value})


def _json(document: Any) -> Response:
    return Response(type=JSON, body=json.dumps(document, allow_nan=False).encode())


def _smaller(request: CurveRequest) -> CurveRequest:
    names = ("axis", "smoothing", "decay", "width", "first", "last")
    return CurveRequest(**{name: getattr(request, name) for name in names}, points=800)


def _curve(connection: Connection, asked: Asked) -> Response:
    """Return the curve of a scalar with its markers as JSON."""
    run, name = asked.query.get("run", ""), asked.query.get("name", LOSS)
    choice = chart_choice(asked)
    if tensor := asked.query.get("tensor"):
        history = tensor_history(connection, run, asked.query.get("kind", ""), name, tensor)
        choice = replace(choice, request=replace(choice.request, smoothing=Smoothing.NONE))
    else:
        history = read_chart(connection, run, name)
    document = curve(history, choice.request).document()
    if asked.query.get("markers"):
        lines, evaluations = event_lines(connection, run), read_chart(connection, run, EVAL_LOSS)
        found = markers(lines, evaluations, history, choice.request.axis)
        document["markers"] = [[one.group, one.x, one.step, one.text, one.is_critical] for one in found]
    return _json(document)


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
