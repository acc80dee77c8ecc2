"""Requests for pages: the choices in their query, and the routes of the data that scripts request."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from rankscope_contract.model.kinds import OPS
from rankscope_storage.connection import Connection
from rankscope_view.data.cell_value import cell_value
from rankscope_view.data.comparison import DIFFERENCE, LETTERS, Side, difference
from rankscope_view.data.curves import Axis, Curve, CurveRequest, Smoothing, curve, joined
from rankscope_view.data.detail import CHARTS, nothing, read_charts
from rankscope_view.data.evaluation import evaluation_curve
from rankscope_view.data.events import event_lines, markers
from rankscope_view.data.grid import MOST_ROWS, GridRequest, Order, TensorKinds, histogram_grid, tensor_grid
from rankscope_view.data.metrics import metric_curve, metric_histories, named_histories, read_metrics
from rankscope_view.data.ranks import RankOrder, rank_grid, rank_table
from rankscope_view.data.runs import run_goodput
from rankscope_view.data.series import EVAL_LOSS, LOSS, History
from rankscope_view.data.tensor import tensor_curve, tensor_detail
from rankscope_view.pages import run as run_page
from rankscope_view.pages import tensors as tensor_page

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
    return tensor_page.TensorChoice(
        kind=kind,
        op=query["op"] if query.get("op") in OPS else "norm",
        is_relative=not query.get("absolute"),
        order=next((one for one in Order if one == query.get("order")), Order.MODEL),
        rank=request.count("rank") if query.get("rank") else None,
        search=query.get("q", ""),
        tensor=query.get("tensor"),
        rows=query.get("rows"),
        columns=query.get("columns"),
    )


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
    found = [(one, *line) for one in sides for line in named_histories(connection, one.run, source, one.rank)]
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
    return GridRequest(
        kind=choice.kind,
        op=choice.op,
        is_relative=choice.is_relative,
        order=choice.order,
        words=tuple(choice.search.lower().split()),
        rank=choice.rank,
        rows=_pair(choice.rows),
        columns=_pair(choice.columns),
        most_rows=max(1, request.count("height") or MOST_ROWS),
    )


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
    value = None if found.value is None or not math.isfinite(found.value) else found.value
    return _json(asdict(found) | {"value": value})


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
        if name == EVAL_LOSS:
            drawn = evaluation_curve(history, read[LOSS], choice.request)
        else:
            drawn = curve(history, choice.request)
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
    history = named_histories(connection, run, name)[0][1]
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
