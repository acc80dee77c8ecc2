"""Answer requests for pages from a store: the choices in their query, the data that scripts request, and a cache.

This module performs no network I/O: the service and `rankscope view` pass it the path and the query of a request.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import io
import itertools
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import quote

from rankscope_contract.model.kinds import OPS
from rankscope_contract.wire.escaping import file_name
from rankscope_storage.base.errors import damage
from rankscope_storage.base.location import Location
from rankscope_storage.connection import Connection, connect
from rankscope_view.assets import ASSETS, Asset, assets_of_file, digest
from rankscope_view.data.comparison import DIFFERENCE, LETTERS, SCALARS, Side, compare, difference
from rankscope_view.data.curves import Axis, Curve, CurveRequest, Smoothing, curve, joined
from rankscope_view.data.detail import CHARTS, RunDetail, chart_curve, nothing, read_charts, read_detail
from rankscope_view.data.events import EVENT_GROUPS, NEWEST, EventLog, Group, event_lines, event_log, markers
from rankscope_view.data.grid import (
    MOST_ROWS,
    GridRequest,
    Order,
    TensorKinds,
    cell_value,
    histogram_grid,
    histogram_tensors,
    tensor_grid,
    tensor_kinds,
)
from rankscope_view.data.incidents import counted, incident_story, incidents
from rankscope_view.data.metrics import metric_curve, metric_histories, read_metrics, scalar_lines
from rankscope_view.data.ranks import RankOrder, rank_grid, rank_table
from rankscope_view.data.runs import RunQuery, RunRow, known_runs, run_goodput, run_list, run_row
from rankscope_view.data.series import EVAL_LOSS, GRAD_NORM, LOSS, History
from rankscope_view.data.tensor import first_to_leave, tensor_curve, tensor_detail
from rankscope_view.pages import compare as compare_page
from rankscope_view.pages import incident as incident_page
from rankscope_view.pages import ranks as rank_page
from rankscope_view.pages import run as run_page
from rankscope_view.pages import tensors as tensor_page
from rankscope_view.pages.rendering import Place, compile_templates, render
from rankscope_view.report import report

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


class NoRunError(NotFoundError):
    """The store has no such run yet; the text names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: the segments of its path, its query, and the problems of the service to show."""

    segments: tuple[str, ...]
    query: Query
    alarms: tuple[str, ...] = ()
    version: int = -1  # of the store

    @property
    def run(self) -> str:
        """Return the name of the run in the path. The query has the names that cannot be in a path."""
        return self.query.get("run") or self.segments[1]

    @property
    def runs(self) -> list[str]:
        """Return the names of the runs that are requested, such as those of a comparison; none for the list of runs."""
        named = self.segments[1:2] if self.segments[:1] == ("runs",) else ()
        return list(filter(None, (self.query.get("run"), *named, *map(self.query.get, LETTERS))))

    @property
    def no_run(self) -> NoRunError:
        """Return the error of a request for a run that the store does not have."""
        return NoRunError(f"The store has no run {self.run!r}.")

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


def chart_choice(request: Request) -> run_page.ChartChoice:
    """Return the choices of the reader for charts, from the query. Unknown values are the default."""
    query = request.query
    axis = next((one for one in Axis if one == query.get("axis")), Axis.STEP)
    smoothing = next((one for one in Smoothing if one == query.get("smooth")), Smoothing.EMA)
    strength = request.number("strength")
    chosen = CurveRequest(
        axis=axis,
        smoothing=smoothing,
        decay=min(max(strength, 0.0), 0.999) if strength is not None and smoothing is Smoothing.EMA else 0.9,
        width=int(min(max(strength, 1), 500)) if strength is not None and smoothing is not Smoothing.EMA else 20,
        first=request.number("from"),
        last=request.number("to"),
        points=min(max(request.count("points") or 4000, 8), 100_000),
        newest=request.count("tail") or None,
    )
    return run_page.ChartChoice(request=chosen, is_log=bool(query.get("log")), is_cut=bool(query.get("cut")))


def tensor_choice(request: Request, kinds: TensorKinds) -> tensor_page.TensorChoice | None:
    """Return the choices of the reader for tensors; None if the run has no statistics of tensors."""
    query = request.query
    kind = query.get("kind") if query.get("kind") in kinds.counts else kinds.default
    if kind is None:
        return None
    search, rows, columns = query.get("q", ""), query.get("rows"), query.get("columns")
    grid = GridRequest(
        kind=kind,
        op=query["op"] if query.get("op") in OPS else "norm",
        is_relative=not query.get("absolute"),
        order=next((one for one in Order if one == query.get("order")), Order.MODEL),
        words=tuple(search.lower().split()),
        rank=request.count("rank") if query.get("rank") else None,
        rows=_pair(rows),
        columns=_pair(columns),
    )
    return tensor_page.TensorChoice(grid=grid, search=search, tensor=query.get("tensor"), rows=rows, columns=columns)


def compared_sides(request: Request) -> list[Side]:
    """Return the sides of a comparison in a query: `a=run`, and `a.rank=3` for one rank of it."""
    found = []
    for letter in LETTERS:
        if run := request.query.get(letter):
            rank = request.count(f"{letter}.rank") if request.query.get(f"{letter}.rank") else None
            found.append(Side(letter=letter, run=run, rank=rank))
    return found


def compared_curve(letters: Sequence[str], histories: Sequence[History], name: str, request: CurveRequest) -> Curve:
    """Return the histories of a scalar of several sides, with these labels, as lines of one curve on the axis of steps.

    If the name is DIFFERENCE, the lines are those of all other sides minus the first one, on the axis of common steps.
    """
    if name == DIFFERENCE:
        histories = [difference(histories[0], other) for other in histories[1:]]
        letters = [f"{letter} − {letters[0]}" for letter in letters[1:]]
    return replace(joined([curve(one, replace(request, axis=Axis.STEP)) for one in histories], letters), restarts=())


def compared_curves(connection: Connection, request: Request) -> Response:
    """Return the curves of a scalar of several sides as JSON."""
    sides, name = compared_sides(request), request.query.get("name", LOSS)
    source = LOSS if name == DIFFERENCE else name
    if len(sides) < 2:
        raise NotFoundError("A comparison needs two sides.")
    absent = [("", nothing(source))]
    found = [(one, *line) for one in sides for line in scalar_lines(connection, one.run, source, one.rank) or absent]
    labels = [", ".join(filter(None, (one.letter.upper(), words))) for one, words, _ in found]
    return _json(compared_curve(labels, [rows for *_, rows in found], name, chart_choice(request).request).document())


def _pair(text: str | None) -> tuple[int, int] | None:
    """Return the numbers of a range such as `3-17`; None without a valid range."""
    first, _, last = (text or "").partition("-")
    return (int(first), int(last)) if first.isdecimal() and last.isdecimal() and len(text or "") < 40 else None


def _grid_request(request: Request) -> GridRequest:
    """Return the choices of a heat map in a query. `height` is the number of pixels for its rows."""
    choice = tensor_choice(request, TensorKinds(counts={request.query.get("kind", ""): 0}))
    assert choice is not None
    return replace(choice.grid, most_rows=max(1, request.count("height") or MOST_ROWS))


def tensor_map(connection: Connection, request: Request) -> Response:
    """Return the grid of all tensors of one kind as bytes."""
    found = tensor_grid(connection, request.query.get("run", ""), _grid_request(request))
    return Response(type=BYTES, body=found.encoded())


def histogram_map(connection: Connection, request: Request) -> Response:
    """Return the grid of the histograms of one tensor as bytes."""
    query = request.query
    found = histogram_grid(connection, query.get("run", ""), query.get("kind", ""), query.get("tensor", ""))
    return Response(type=BYTES, body=found.encoded())


def rank_order(request: Request) -> RankOrder:
    """Return the order of ranks in a query."""
    return next((one for one in RankOrder if one == request.query.get("order")), RankOrder.WORST)


def rank_map(connection: Connection, request: Request) -> Response:
    """Return the strips of all ranks as bytes."""
    run = request.query.get("run", "")
    table = rank_table(connection, run).ordered(rank_order(request))
    found = rank_grid(connection, run, table, whole_step=bool(request.query.get("whole")))
    return Response(type=BYTES, body=found.encoded())


def cell(connection: Connection, request: Request) -> Response:
    """Return the exact value of a cell of the map of tensors as JSON. The query has the tensors of its row."""
    try:
        names = [str(name) for name in json.loads(request.query.get("tensors", "[]"))]
    except (ValueError, TypeError):
        names = []
    grid = replace(_grid_request(request), tensors=tuple(names), words=(), rows=None)
    found = cell_value(connection, request.query.get("run", ""), grid, request.count("column")) if names else None
    if found is None:
        return _json(None)
    value = found["value"]
    return _json(found | {"value": None if value is None or not math.isfinite(value) else value})


def _json(document: Any) -> Response:
    return Response(type=JSON, body=json.dumps(document, allow_nan=False).encode())


def scalar_curve(connection: Connection, request: Request) -> Response:
    """Return the curve of a scalar with its markers as JSON."""
    run, name = request.query.get("run", ""), request.query.get("name", LOSS)
    choice = chart_choice(request)
    if (tensor := request.query.get("tensor")) is not None:
        attempt = request.count("attempt") if "attempt" in request.query else None
        axis = choice.request.axis if attempt is not None else Axis.ARRIVAL  # ranks of several attempts share an axis
        detail = tensor_detail(connection, run, request.query.get("kind", ""), name, tensor)
        unsmoothed = replace(choice.request, smoothing=Smoothing.NONE, axis=axis)
        return _json(tensor_curve(connection, run, detail, unsmoothed, attempt).document())
    has_markers = bool(request.query.get("markers"))
    metric = None if name in CHARTS else read_metrics(connection, run).found.get(name)
    evaluations = nothing(EVAL_LOSS)
    if metric is not None:
        histories = metric_histories(connection, run, metric)
        history, drawn = histories[0], metric_curve(metric, histories, choice.request)
    else:
        others = [EVAL_LOSS] if has_markers else []
        read = read_charts(connection, run, [name, *others, *([LOSS] if name == EVAL_LOSS else [])])
        history, evaluations = read[name], read.get(EVAL_LOSS, evaluations)
        drawn = chart_curve(history, read.get(LOSS) or nothing(LOSS), choice.request)
    document = drawn.document()
    if has_markers or metric is not None:
        found = markers(event_lines(connection, run), evaluations, history, choice.request.axis)
        document["markers"] = [[one.group, one.x, one.step, one.text, one.is_critical] for one in found]
    return _json(document)


def goodput(connection: Connection, request: Request) -> Response:
    """Return the goodput of a run as JSON: its texts for the header; null without step times."""
    found = run_goodput(connection, request.query.get("run", ""))
    return _json(run_page.goodput_texts(found["goodput"], found["lost"]))


def curve_csv(connection: Connection, request: Request) -> Response:
    """Return all stored rows of a scalar in the zoom window as CSV."""
    run, name = request.query.get("run", ""), request.query.get("name", LOSS)
    history = next((rows for _, rows in scalar_lines(connection, run, name)), nothing(name))
    sheet = io.StringIO()
    writer = csv.writer(sheet)
    writer.writerow(("attempt", "step", "cumulative_step", "time", name, "lowest", "highest", "is_superseded"))
    names = ("attempt", "step", "cumulative", "time", "value", "lowest", "highest")
    columns = [getattr(history, column).tolist() for column in names]
    writer.writerows(zip(*columns, (~history.stands).astype(int).tolist(), strict=True))
    disposition = {"Content-Disposition": 'attachment; filename="curve.csv"'}
    return Response(type="text/csv; charset=utf-8", body=sheet.getvalue().encode(), headers={**HEADERS, **disposition})


DATA: Final[Mapping[str, Callable[[Connection, Request], Response]]] = {
    "grid": tensor_map,
    "histogram": histogram_map,
    "ranks": rank_map,
    "cell": cell,
    "compare": compared_curves,
    "goodput": goodput,
    "curve": scalar_curve,
    "curve.csv": curve_csv,
}
"""Routes by the last part of their address."""


_IMMUTABLE: Final = {"Cache-Control": "public, max-age=31536000, immutable"}
_PAGE_SECONDS: Final = 5.0
"""Longest time in seconds for which a page is cached, because it contains ages."""

_RETRY_SECONDS: Final = 2
"""Time in seconds after which the page of a run that is not stored yet is requested again."""

MOST_STEP_TIMES: Final = 50_000
"""Number of step times of a run up to which its page contains the goodput. It takes seconds for a million, and the page
then requests it."""

_CACHED: Final = 256
_ABOUT_NOTHING: Final[Sequence[tuple[tuple[str, ...], Query]]] = (
    ((), {"q": "\0"}),
    (("runs", ""), {}),
    (("data", "curve"), {"run": "", "markers": "1"}),
    (("data", "grid"), {"run": ""}),
)
"""Requests that need the modules, views and statements of the most important pages, but find no run."""


def is_slow(segments: Sequence[str]) -> bool:
    """Return whether an answer takes seconds for a long run. Pages do not wait for such answers."""
    return tuple(segments[2:]) == ("report",) or tuple(segments) in {("data", "curve.csv"), ("data", "goodput")}


class Site:
    """The pages of the store at `path`, below the prefix `base`. The methods may be called by several threads.

    `place` has the facts for pages that do not show the store.
    """

    def __init__(
        self,
        path: Location,
        *,
        base: str = "",
        has_service: bool = False,
        store: Location | None = None,
        clock: Callable[[], float] = time.time,
        most_step_times: int = MOST_STEP_TIMES,
    ) -> None:
        self._path = path
        folder = str((store or path).absolute())  # `path` may be a temporary copy of it
        self.place = Place(base=base, assets=digest(), has_service=has_service, store=folder)
        self._is_single = has_service  # the threads of DuckDB would slow the flushes of a service
        self._clock = clock
        self._most_step_times = most_step_times
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[Any, ...], tuple[int, float, Response]] = OrderedDict()

    def version(self) -> int:
        """Return the newest version of the store."""
        with connect(self._path, single_threaded=True) as connection:
            return connection.version

    def prepare(self) -> None:
        """Open the store, define the views of pages, start the threads that read files, and compile the templates.

        Otherwise, the first request would wait for them. The answers are about no run and are not kept.
        """
        with connect(self._path, single_threaded=self._is_single) as connection:
            for segments, query in _ABOUT_NOTHING:
                with contextlib.suppress(NotFoundError):
                    self._answer(connection, Request(segments=segments, query=query))
            for group in itertools.islice(connection.row_groups("scalars", (), {}).each(), 1):
                collections.deque(group.batches(("run", "value")), maxlen=0)
        compile_templates()

    def respond(self, segments: Sequence[str], query: Query, alarms: Sequence[str] = ()) -> Response:
        """Return the answer to the request for the path with these decoded `segments`. Bad requests raise nothing."""
        request = Request(segments=tuple(segments), query=query, alarms=tuple(alarms))
        if request.segments[:1] == ("assets",):
            return _asset(request.segments[-1])
        with connect(self._path, single_threaded=self._is_single) as connection:
            version = connection.version
            request = replace(request, version=version)
            key = (request.segments, tuple(sorted(query.items())), request.alarms)
            if known := self._known(key, version):
                return known
            try:
                found, _ = connection.undamaged(lambda: self._answer(connection, request), request.runs)
            except NotFoundError as error:
                seconds = _RETRY_SECONDS if isinstance(error, NoRunError) else None
                return self._message(404, "Not found", "Not found", str(error), seconds)
        if request.segments[2:] != ("report",):  # it is large, and requested once
            self._remember(key, version, found)
        return found

    def failure(self, error: Exception) -> Response:
        """Return the page which states that a query failed with `error`."""
        reason = damage(error) or str(error).partition("\n")[0]
        return self._message(500, "Error", "The query failed", reason)

    def _message(self, status: int, title: str, heading: str, reason: str, seconds: int | None = None) -> Response:
        """Return a page without content, which browsers load again every `seconds`."""
        headers = HEADERS if seconds is None else {**HEADERS, "Refresh": str(seconds)}
        html = render("message.html", place=self.place, title=title, heading=heading, reason=reason, seconds=seconds)
        return Response(status=status, body=html.encode("utf-8", "replace"), headers=headers)

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

    def _answer(self, connection: Connection, request: Request) -> Response:
        match request.segments:
            case ():
                return self._list(connection, request)
            case ("runs", _):
                return self._run(connection, request)
            case ("runs", _, "report"):
                return self._report(connection, request)
            case ("runs", _, "events"):
                return self._events(connection, request)
            case ("runs", _, "tensors"):
                return self._tensors(connection, request)
            case ("runs", _, "ranks"):
                return self._ranks(connection, request)
            case ("runs", _, "incidents", *_):
                return self._incidents(connection, request)
            case ("compare",):
                return self._compare(connection, request)
            case ("data", name) if name in DATA:
                return DATA[name](connection, request)
        raise NotFoundError(f"There is no page at /{'/'.join(request.segments)}.")

    def _place_of(self, request: Request, *, is_live: bool) -> Place:
        return replace(self.place, is_live=is_live, version=request.version)

    def _list(self, connection: Connection, request: Request) -> Response:
        search = request.query.get("q", "")
        state, sort = request.query.get("state"), request.query.get("sort", "")
        query = RunQuery.parse(search, state=state, sort=sort, page=request.count("page"))
        found, damaged = connection.undamaged(lambda: run_list(connection, query))
        place = self._place_of(request, is_live=True)  # a run may begin at any time
        return _page(run_page.list_page(place, found, search, self._clock(), (*request.alarms, *damaged)))

    def _detail(self, connection: Connection, request: Request) -> tuple[Place, RunDetail]:
        most = None if request.query.get("goodput") else self._most_step_times
        found = read_detail(connection, request.run, most_step_times=most)
        if found is None:
            raise request.no_run
        return self._place_of(request, is_live=found.row.is_live), found

    def _run(self, connection: Connection, request: Request) -> Response:
        place, found = self._detail(connection, request)
        choice = chart_choice(request)
        shown = replace(choice.request, points=800, newest=None)
        loss = found.history(LOSS)
        curves = {name: chart_curve(history, loss, shown) for name, history in found.histories.items()}
        log = _log(found)
        metrics = read_metrics(connection, request.run)
        return _page(run_page.page(place, found, choice, curves=curves, log=log, metrics=metrics))

    def _events(self, connection: Connection, request: Request) -> Response:
        place, found = self._detail(connection, request)
        group = next((one for one in Group if one == request.query.get("group")), None)
        page = request.count("page")
        newest = (page + 1) * NEWEST + 1
        log = _log(found, groups=(group,) if group else (), newest=newest)
        return _page(run_page.events_page(place, found, log, group, page))

    def _report(self, connection: Connection, request: Request) -> Response:
        found = report(connection, request.run, made_at=self._clock(), source=self._path.name)
        if found is None:
            raise request.no_run
        headers = {
            "Content-Security-Policy": f"{assets_of_file().policy}; frame-ancestors 'none'",
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file_name(request.run))}.html",
        }
        return Response(body=found.encode("utf-8", "replace"), headers={**HEADERS, **headers})

    def _row(self, connection: Connection, request: Request) -> tuple[Place, RunRow]:
        row = run_row(connection, request.run)
        if row is None:
            raise request.no_run
        return self._place_of(request, is_live=row.is_live), row

    def _tensors(self, connection: Connection, request: Request) -> Response:
        place, row = self._row(connection, request)
        kinds = tensor_kinds(connection, row.run)
        choice = tensor_choice(request, kinds)
        detail, drawn = None, None
        leaving = first_to_leave(connection, row.run)
        if choice is not None:
            first = next((one.tensor for one in leaving if one.kind == choice.grid.kind), None)
            name = first if choice.tensor is None else choice.tensor
            if name is not None:
                detail = tensor_detail(connection, row.run, choice.grid.kind, choice.grid.op, name)
                shown = CurveRequest(axis=Axis.ARRIVAL, smoothing=Smoothing.NONE, points=800)
                drawn = tensor_curve(connection, row.run, detail, shown)
        histograms = histogram_tensors(connection, row.run)
        return _page(
            tensor_page.page(
                place, row, kinds, choice, detail=detail, curve=drawn, leaving=leaving, histograms=histograms,
                histogram=request.query.get("histogram"),
            )
        )  # fmt: skip

    def _ranks(self, connection: Connection, request: Request) -> Response:
        place, row = self._row(connection, request)
        table = rank_table(connection, row.run)
        found = incidents(connection, [row.run]).get(row.run, [])
        return _page(rank_page.page(place, row, table, rank_order(request), self._clock(), past=found))

    def _incidents(self, connection: Connection, request: Request) -> Response:
        place, row = self._row(connection, request)
        found = incidents(connection, [row.run]).get(row.run, [])
        if len(request.segments) == 3:
            listed = counted(connection, found)
            return _page(render("incidents.html", place=place, row=row, found=listed))
        one = next((one for one in found if one.key == request.segments[3]), None)
        if one is None:
            raise NotFoundError(f"The run {row.run!r} has no incident {request.segments[3]!r}.")
        return _page(incident_page.page(place, row, one, incident_story(connection, one, found)))

    def _compare(self, connection: Connection, request: Request) -> Response:
        sides = compared_sides(request)
        if not sides and request.query.get("run"):
            sides = [Side(letter=LETTERS[0], run=request.query["run"])]
        if len(sides) < 2 or request.query.get("add"):
            others = sorted(row["run"] for row in known_runs(connection))[:1000]
            return _page(compare_page.choose_page(self.place, sides, others))
        found = compare(connection, sides)
        if found is None:
            names = " and ".join(repr(side.run) for side in sides)
            raise NoRunError(f"The store does not have the runs {names}.")
        choice = chart_choice(request)
        letters, curves = [side.letter.upper() for side in sides], dict[str, Curve]()
        for name in (LOSS, DIFFERENCE, *SCALARS[1:]):
            histories = [
                one.histories.get(LOSS if name == DIFFERENCE else name) or nothing(name) for one in found.sides
            ]
            drawn = compared_curve(letters, histories, name, replace(choice.request, points=800, newest=None))
            curves |= {name: drawn} if drawn.rows else {}
        place = self._place_of(request, is_live=any(one.detail.row.is_live for one in found.sides))
        own = {
            one.name: one
            for run in dict.fromkeys(side.run for side in sides)
            for one in read_metrics(connection, run).own
        }
        return _page(compare_page.page(place, found, choice, curves, list(own.values())))


def _log(found: RunDetail, groups: Sequence[Group] = (), newest: int = NEWEST) -> EventLog:
    others = [found.history(GRAD_NORM)]
    evaluations, groups = found.history(EVAL_LOSS), groups or EVENT_GROUPS
    return event_log(found.lines, found.history(LOSS), others, evaluations, groups=groups, newest=newest)


def _page(html: str) -> Response:
    return Response(body=html.encode("utf-8", "replace"))


def _asset(name: str) -> Response:
    found: Asset | None = ASSETS.get(name)
    if found is None:
        return Response(status=404, type="text/plain; charset=utf-8", body=f"there is no asset {name}".encode())
    return Response(type=found.type, body=found.read(), headers={**HEADERS, **_IMMUTABLE})
