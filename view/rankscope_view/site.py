"""Answer requests for pages from a store: addresses, choices of the reader, and a cache by version of the store.

This module performs no network I/O: the service and `rankscope view` pass it the path and the query of a request.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from rankscope_contract.wire.escaping import file_name
from rankscope_storage.base.errors import damage
from rankscope_storage.connection import Connection, connect
from rankscope_view import answers
from rankscope_view.answers import HEADERS, HTML, Asked, NoRunError, NotFoundError, Query, Response, chart_choice
from rankscope_view.assets import ASSETS, Asset, digest
from rankscope_view.data.comparison import DIFFERENCE, LETTERS, SCALARS, Side, compare
from rankscope_view.data.curves import Axis, Curve, CurveRequest, Smoothing, curve
from rankscope_view.data.detail import RunDetail, nothing, read_detail
from rankscope_view.data.evaluation import evaluation_curve
from rankscope_view.data.events import EVENT_GROUPS, NEWEST, EventLog, Group, event_log
from rankscope_view.data.grid import histogram_tensors, tensor_kinds
from rankscope_view.data.history import EVAL_LOSS, GRAD_NORM, LOSS
from rankscope_view.data.incidents import counted, incident_story, incidents
from rankscope_view.data.metrics import read_metrics
from rankscope_view.data.ranks import rank_table
from rankscope_view.data.runs import RunQuery, RunRow, known_runs, run_list, run_row
from rankscope_view.data.tensor import first_to_leave, tensor_curve, tensor_detail
from rankscope_view.pages import compare as compare_page
from rankscope_view.pages import incident as incident_page
from rankscope_view.pages import ranks as rank_page
from rankscope_view.pages import run as run_page
from rankscope_view.pages import run_list as list_page
from rankscope_view.pages import tensors as tensor_page
from rankscope_view.pages.format import text
from rankscope_view.pages.parts import Place, document
from rankscope_view.report import report

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
    """The pages of the store at `path`, below the prefix `base`. The methods may be called by several threads."""

    def __init__(
        self,
        path: Path,
        *,
        base: str = "",
        has_service: bool = False,
        store: Path | None = None,
        clock: Callable[[], float] = time.time,
        most_step_times: int = MOST_STEP_TIMES,
    ) -> None:
        self._path = path
        folder = str((store or path).absolute())  # `path` may be a temporary copy of it
        self._place = Place(base=base, assets=digest(), has_service=has_service, store=folder)
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
        """Open the store, define the views that pages read, and start the threads that read files.

        Otherwise, the first request would wait for them. The answers are about no run and are not kept.
        """
        with connect(self._path, single_threaded=self._is_single) as connection:
            for segments, query in _ABOUT_NOTHING:
                with contextlib.suppress(NotFoundError):
                    self._answer(connection, Asked(segments=segments, query=query))
            for group in itertools.islice(connection.row_groups("scalars", (), {}).each(), 1):
                collections.deque(group.batches(("run", "value")), maxlen=0)

    def respond(self, segments: Sequence[str], query: Query, alarms: Sequence[str] = ()) -> Response:
        """Return the answer to the request for the path with these decoded `segments`. Bad requests raise nothing."""
        asked = Asked(segments=tuple(segments), query=query, alarms=tuple(alarms))
        if asked.segments[:1] == ("assets",):
            return _asset(asked.segments[-1])
        with connect(self._path, single_threaded=self._is_single) as connection:
            version = connection.version
            asked = replace(asked, version=version)
            key = (asked.segments, tuple(sorted(query.items())), asked.alarms)
            if known := self._known(key, version):
                return known
            try:
                found, _ = connection.undamaged(lambda: self._answer(connection, asked), asked.runs)
            except NotFoundError as error:
                return self._missing(error)
        if asked.segments[2:] != ("report",):  # it is large, and requested once
            self._remember(key, version, found)
        return found

    def failure(self, error: Exception) -> Response:
        """Return the page which states that a query failed with `error`."""
        reason = damage(error) or str(error).partition("\n")[0]
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
            case ("runs", _, "report"):
                return self._report(connection, asked)
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
            case ("data", name) if name in answers.DATA:
                return answers.DATA[name](connection, asked)
        raise NotFoundError(f"There is no page at /{'/'.join(asked.segments)}.")

    def _missing(self, error: NotFoundError) -> Response:
        may_begin = isinstance(error, NoRunError)
        later = f"<p>This page loads again every {_RETRY_SECONDS} s until the run appears.</p>" if may_begin else ""
        body = f'<div class="panel blank"><strong>Not found</strong><p>{text(str(error))}</p>{later}</div>'
        headers = {**HEADERS, "Refresh": str(_RETRY_SECONDS)} if may_begin else HEADERS
        return Response(status=404, body=document(self._place, "Not found", body).encode(), headers=headers)

    def _place_of(self, asked: Asked, *, is_live: bool) -> Place:
        return replace(self._place, is_live=is_live, version=asked.version)

    def _list(self, connection: Connection, asked: Asked) -> Response:
        search = asked.query.get("q", "")
        state, sort = asked.query.get("state"), asked.query.get("sort", "")
        query = RunQuery.parse(search, state=state, sort=sort, page=asked.count("page"))
        found, damaged = connection.undamaged(lambda: run_list(connection, query))
        place = self._place_of(asked, is_live=True)  # a run may begin at any time
        return _page(list_page.page(place, found, search, self._clock(), (*asked.alarms, *damaged)))

    def _detail(self, connection: Connection, asked: Asked) -> tuple[Place, RunDetail]:
        most = None if asked.query.get("goodput") else self._most_step_times
        found = read_detail(connection, asked.run, most_step_times=most)
        if found is None:
            raise NoRunError(f"The store has no run {asked.run!r}.")
        return self._place_of(asked, is_live=found.row.is_live), found

    def _run(self, connection: Connection, asked: Asked) -> Response:
        place, found = self._detail(connection, asked)
        choice = chart_choice(asked)
        request = _smaller(choice.request)
        curves = {name: curve(history, request) for name, history in found.histories.items() if name != EVAL_LOSS}
        if EVAL_LOSS in found.histories:
            curves[EVAL_LOSS] = evaluation_curve(found.history(EVAL_LOSS), found.history(LOSS), request)
        log = _log(found)
        metrics = read_metrics(connection, asked.run)
        return _page(run_page.page(place, found, choice, curves=curves, log=log, metrics=metrics))

    def _events(self, connection: Connection, asked: Asked) -> Response:
        place, found = self._detail(connection, asked)
        group = next((one for one in Group if one == asked.query.get("group")), None)
        page = asked.count("page")
        newest = (page + 1) * NEWEST + 1
        log = _log(found, groups=(group,) if group else (), newest=newest)
        return _page(run_page.events_page(place, found, log, group, page))

    def _report(self, connection: Connection, asked: Asked) -> Response:
        found = report(connection, asked.run, made_at=self._clock(), source=self._path.name)
        if found is None:
            raise NoRunError(f"The store has no run {asked.run!r}.")
        headers = {
            "Content-Security-Policy": f"{found.policy}; frame-ancestors 'none'",
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file_name(asked.run))}.html",
        }
        return Response(body=found.html.encode("utf-8", "replace"), headers={**HEADERS, **headers})

    def _row(self, connection: Connection, asked: Asked) -> tuple[Place, RunRow]:
        row = run_row(connection, asked.run)
        if row is None:
            raise NoRunError(f"The store has no run {asked.run!r}.")
        return self._place_of(asked, is_live=row.is_live), row

    def _tensors(self, connection: Connection, asked: Asked) -> Response:
        place, row = self._row(connection, asked)
        kinds = tensor_kinds(connection, row.run)
        choice = answers.tensor_choice(asked, kinds)
        detail, drawn = None, None
        leaving = first_to_leave(connection, row.run)
        if choice is not None:
            first = next((one.tensor for one in leaving if one.kind == choice.kind), None)
            name = first if choice.tensor is None else choice.tensor
            if name is not None:
                detail = tensor_detail(connection, row.run, choice.kind, choice.op, name)
                request = CurveRequest(axis=Axis.ARRIVAL, smoothing=Smoothing.NONE, points=800)
                drawn = tensor_curve(connection, row.run, detail, request)
        histograms = histogram_tensors(connection, row.run)
        return _page(
            tensor_page.page(
                place, row, kinds, choice, detail=detail, curve=drawn, leaving=leaving, histograms=histograms,
                histogram=asked.query.get("histogram"),
            )
        )  # fmt: skip

    def _ranks(self, connection: Connection, asked: Asked) -> Response:
        place, row = self._row(connection, asked)
        table = rank_table(connection, row.run)
        found = incidents(connection, [row.run]).get(row.run, [])
        return _page(rank_page.page(place, row, table, answers.rank_order(asked), self._clock(), past=found))

    def _incidents(self, connection: Connection, asked: Asked) -> Response:
        place, row = self._row(connection, asked)
        found = incidents(connection, [row.run]).get(row.run, [])
        if len(asked.segments) == 3:
            return _page(incident_page.list_page(place, row, counted(connection, found)))
        one = next((one for one in found if one.key == asked.segments[3]), None)
        if one is None:
            raise NotFoundError(f"The run {row.run!r} has no incident {asked.segments[3]!r}.")
        return _page(incident_page.page(place, row, one, incident_story(connection, one, found)))

    def _compare(self, connection: Connection, asked: Asked) -> Response:
        sides = answers.compared_sides(asked)
        if not sides and asked.query.get("run"):
            sides = [Side(letter=LETTERS[0], run=asked.query["run"])]
        if len(sides) < 2 or asked.query.get("add"):
            others = sorted(row["run"] for row in known_runs(connection))[:1000]
            return _page(compare_page.choose_page(self._place, sides, others))
        found = compare(connection, sides)
        if found is None:
            names = " and ".join(repr(side.run) for side in sides)
            raise NoRunError(f"The store does not have the runs {names}.")
        choice = chart_choice(asked)
        letters, curves = [side.letter.upper() for side in sides], dict[str, Curve]()
        for name in (LOSS, DIFFERENCE, *SCALARS[1:]):
            histories = [
                one.histories.get(LOSS if name == DIFFERENCE else name) or nothing(name) for one in found.sides
            ]
            drawn = answers.compared_curve(letters, histories, name, _smaller(choice.request))
            curves |= {name: drawn} if drawn.rows else {}
        place = self._place_of(asked, is_live=any(one.detail.row.is_live for one in found.sides))
        own = {one.name: one for run in {side.run for side in sides} for one in read_metrics(connection, run).own}
        return _page(compare_page.page(place, found, choice, curves, list(own.values())))


def _log(found: RunDetail, groups: Sequence[Group] = (), newest: int = NEWEST) -> EventLog:
    others = [found.history(GRAD_NORM)]
    evaluations, groups = found.history(EVAL_LOSS), groups or EVENT_GROUPS
    return event_log(found.lines, found.history(LOSS), others, evaluations, groups=groups, newest=newest)


def _page(html: str) -> Response:
    return Response(body=html.encode("utf-8", "replace"))


def _smaller(request: CurveRequest) -> CurveRequest:
    names = ("axis", "smoothing", "decay", "width", "first", "last")
    return CurveRequest(**{name: getattr(request, name) for name in names}, points=800)


def _asset(name: str) -> Response:
    found: Asset | None = ASSETS.get(name)
    if found is None:
        return Response(status=404, type="text/plain; charset=utf-8", body=f"there is no asset {name}".encode())
    return Response(type=found.type, body=found.read(), headers={**HEADERS, **_IMMUTABLE})
