"""Prepare the curve of a scalar for a chart: axis, zoom window, reduction to few points, smoothing and gaps.

All points of a curve are stored values; nothing is interpolated. A reduced curve has at most four points per bucket:
the first, the lowest, the highest and the last finite value. The width of a bucket is a power of two, counted from 0 of
the axis, so that the points of old buckets do not change while a run continues.

The moving average equals that of the SQL macro `moving_average`, except that a value that is not finite has none. The
exponential one is corrected for its bias: its weights add up to 1 from the first row on, while the macro `ema`, as the
rules, gives the first value the weight of all values before it. Averages start again at a restart.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.ma
import numpy.typing as npt

from rankscope_view.data.series import Floats, History, Integers, is_constant, restarts

POINTS: Final = 4000
"""Default limit of the number of points of a curve."""

_POINTS_PER_BUCKET: Final = 4
_MOST_RANGES: Final = 200
_PAUSE_FACTOR: Final = 10.0
"""On an axis of time, the line is broken if no value came for this many times the median distance of two values."""

_BULK: Final = (0.005, 0.975)
"""Quantiles of the values that the range of a chart contains if a reader cuts it. Others are marked at the edge."""

_FENCE: Final = 3.0
"""The cut range ends at most this many interquartile ranges above the upper quartile or below the lower one."""

_BULK_SHARE: Final = 0.6
"""The range is not cut if the bulk takes at least this share of it."""


Places = npt.NDArray[np.float64 | np.int64]
"""Places on an axis: seconds of an axis of time, and integers of others, which are not copied."""


class Axis(enum.StrEnum):
    """Meaning of the horizontal axis of a chart."""

    STEP = "step"  # last value of each step; superseded steps are left out
    CUMULATIVE = "cumulative"  # steps of all attempts, repeated ones again
    ATTEMPT = "attempt"  # one line per attempt
    ARRIVAL = "arrival"  # the number of the row; labels are the raw steps
    TIME = "time"  # UTC seconds


class Smoothing(enum.StrEnum):
    """Kind of average that is drawn over the raw values."""

    NONE = "none"
    EMA = "ema"
    AVERAGE = "average"
    BOTH = "both"  # a moving average of the exponential one


class Role(enum.StrEnum):
    """Meaning of one of several lines of a chart, which its drawing depends on."""

    SUBJECT = "subject"  # the rank that the chart is about
    OTHER = "other"  # another rank
    BASELINE = "baseline"
    LIMIT = "limit"  # the value above or below which a rule fires
    TRAINING = "training"  # the training loss behind evaluations


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRequest:
    """Choices of a reader for a chart. `first` and `last` are the zoom window in units of the axis."""

    axis: Axis = Axis.STEP
    smoothing: Smoothing = Smoothing.EMA
    decay: float = 0.9  # weight of the previous average
    width: int = 20  # rows of a moving average
    needs_full_window: bool = False  # no average of fewer than `width` rows
    first: float | None = None
    last: float | None = None
    points: int = POINTS
    newest: int | None = None  # only this many of the newest rows, without reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteRange:
    """Consecutive rows with a value that is not finite, from the first to the last one on the axis."""

    first: float
    last: float
    first_step: int
    last_step: int
    rows: int
    word: str  # NaN, Inf, or both


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart: arrays of equal length. NaN in `value` breaks the line.

    `low` and `high` are the range over ranks; of a reduced curve, the range of the bucket.
    """

    label: str | None  # None: the only line
    x: Floats
    step: Integers
    value: Floats
    smoothed: Floats
    low: Floats
    high: Floats
    role: Role | None = None
    key: str | None = None  # name and labels of the scalar, for rows of a live run; None: the name of the curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Firing:
    """A step at which a rule fired, on the line of its rank.

    `value` is None if the line has no finite value there, or if the rule judges another statistic than the chart shows.
    """

    x: float
    step: int
    value: float | None
    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A scalar as one or several lines, with the facts that a chart must state."""

    name: str
    request: CurveRequest
    lines: tuple[Line, ...]
    nonfinite: tuple[NonfiniteRange, ...]
    restarts: tuple[float, ...]  # on the axis: the first row of each later attempt
    rows: int  # in the window
    rows_left_out: int  # superseded, without a time, or older than the newest ones
    bucket_width: float | None  # None: every row is drawn
    buckets: int
    extent: tuple[float, float] | None  # of the axis, over all rows
    bulk: tuple[float, float] | None  # range of most values, to which a reader can cut the axis
    attempt: int = 0  # of the newest row
    firings: tuple[Firing, ...] = ()

    def range(self, *, is_cut: bool = False) -> tuple[float, float]:
        """Return the range of the vertical axis: all values, or most of them."""
        if is_cut and self.bulk is not None:
            return self.bulk
        known = [values[np.isfinite(values)] for values in (line.value for line in self.lines)]
        finite = np.concatenate([np.array([]), *known])
        return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)

    def document(self) -> dict[str, Any]:
        """Return the curve for JSON, with null in place of NaN."""
        return {
            "name": self.name,
            "axis": self.request.axis,
            "lines": [_line_document(line) for line in self.lines],
            "nonfinite": [[one.first, one.last, _range_label(one)] for one in self.nonfinite],
            "restarts": list(self.restarts),
            "rows": self.rows,
            "buckets": self.buckets,
            "width": self.bucket_width,
            "extent": self.extent,
            "bulk": self.bulk,
            "attempt": self.attempt,
            "firings": [[one.x, one.value, one.rule] for one in self.firings],
            "notice": notice(self),
        }


def notice(curve: Curve) -> str:
    """Return a sentence that states which of the stored rows the chart contains."""
    if curve.rows == 0:
        return "no rows in this window"
    if curve.bucket_width is None:
        text = "1 row stored, drawn" if curve.rows == 1 else f"{curve.rows:,} rows stored, all drawn"
    else:
        text = (
            f"{curve.rows:,} rows drawn as {curve.buckets:,} stretches of {curve.bucket_width:,g}; "
            "the lowest and highest of each are kept"
        )
    if (number := curve.rows_left_out) > 0:
        reason = {Axis.STEP: "superseded", Axis.TIME: "without a time"}.get(curve.request.axis, "older")
        reason = "older" if curve.request.newest else reason
        text += f"; {number:,} {reason} row{' is' if number == 1 else 's are'} left out"
    return text


def _range_label(one: NonfiniteRange) -> str:
    steps = f"{one.first_step:,}" if one.first_step == one.last_step else f"{one.first_step:,}–{one.last_step:,}"
    return f"{one.word} {steps}"


def _line_document(line: Line) -> dict[str, Any]:
    names = ("x", "value", "smoothed", "low", "high")
    arrays: dict[str, Any] = {name: _nulls(getattr(line, name)) for name in names}
    return {"label": line.label, "role": line.role, "key": line.key, "step": line.step.tolist(), **arrays}


def _nulls(values: Floats) -> list[float | None]:
    listed: list[float | None] = values.tolist()
    if np.isfinite(values).all():
        return listed
    return [None if one is None or not math.isfinite(one) else one for one in listed]


def curve(history: History, request: CurveRequest) -> Curve:
    """Return the curve of `history` for a chart."""
    stored = len(history)
    history, x = on_axis(history, request.axis)
    if request.newest is not None and len(history) > request.newest:
        newest = slice(len(history) - request.newest, len(history))
        history, x = history.select(newest), x[newest]
    left_out, extent = stored - len(history), (float(x.min()), float(x.max())) if len(x) else None
    few = slice(1 if is_constant(history.attempt) and is_constant(history.stands) else None)
    newest_attempt = int(history.attempt[few][history.stands[few]].max(initial=0))
    whole, begins = history, np.append(0, restarts(history.attempt))
    visible: range | Integers = range(len(x))
    if request.first is not None or request.last is not None:
        visible = _window(x, request)
        history, x = history.select(visible), x[visible]
    starts = restarts(history.attempt)
    bounds = [0, *(starts.tolist() if request.axis is Axis.ATTEMPT else ()), len(x)]
    parts = [slice(first, last) for first, last in itertools.pairwise(bounds) if last > first]
    width = _bucket_width(history, x, parts, request)
    return Curve(
        name=history.name,
        request=request,
        lines=tuple(_line(whole, begins, int(visible[rows.start]), x[rows], width, request=request) for rows in parts),
        nonfinite=_nonfinite(history, x),
        restarts=() if request.axis is Axis.ATTEMPT else tuple(x[starts].astype(np.float64).tolist()),
        rows=len(history),
        rows_left_out=left_out,
        bucket_width=width,
        buckets=0 if width is None else sum(_bucket_count(history, x, rows, width) for rows in parts),
        extent=extent,
        bulk=_bulk(history.value),
        attempt=newest_attempt,
    )


def joined(curves: Sequence[Curve], labels: Sequence[str]) -> Curve:
    """Return several curves on the same axis as one. The label of a curve begins that of each of its lines."""
    named = list(zip(curves, labels, strict=False))
    lines = [
        replace(line, label=", ".join(filter(None, (label, line.label)))) for one, label in named for line in one.lines
    ]
    ranges = [
        replace(area, word=" of ".join(filter(None, (area.word, label))))
        for one, label in named
        for area in one.nonfinite
    ]
    bulks, extents = ([getattr(one, name) for one in curves] for name in ("bulk", "extent"))
    return replace(
        curves[0],
        lines=tuple(lines),
        nonfinite=tuple(ranges),
        rows=sum(one.rows for one in curves),
        extent=_union(extents),
        bulk=_union(bulks),
    )


def _union(ranges: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    known = [one for one in ranges if one is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None


def on_axis(history: History, axis: Axis) -> tuple[History, Places]:
    """Return the rows of `history` that have a place on `axis`, in the order of the axis, and their places.

    Steps that restart with each epoch are no place; the cumulative position, or the number of the row, is used instead.
    """
    if axis is Axis.STEP:
        history = history.standing
        is_rising = bool((history.step[1:] > history.step[:-1]).all())
        return history, history.step if is_rising else history.cumulative
    if axis is Axis.CUMULATIVE:
        return history, history.cumulative
    if axis is Axis.TIME:
        timed = np.flatnonzero(np.isfinite(history.time))
        history = history.select(timed[np.argsort(history.time[timed], kind="stable")])
        return history, history.time
    if axis is Axis.ATTEMPT:
        rising = (np.diff(history.step) > 0) | (np.diff(history.attempt) > 0)
        if rising.all():
            return history, history.step
    return history, np.arange(len(history))


def _average(history: History, begins: Integers, rows: Integers, request: CurveRequest) -> Floats:
    """Return the chosen average at `rows`; NaN without one. It begins again at each attempt, at the rows `begins`."""
    if request.smoothing is Smoothing.NONE or not len(rows):
        return np.broadcast_to(np.nan, len(rows))
    own = slice(int(begins[np.searchsorted(begins, rows[0], "right") - 1]), int(rows[-1]) + 1)
    values, attempt, rows = history.value[own], history.attempt[own], rows - own.start
    decay = min(max(request.decay, 0.0), 0.9999)
    if request.smoothing is Smoothing.EMA:
        return ema_at(values, attempt, decay, rows)
    if request.smoothing is Smoothing.BOTH:
        values = ema(values, attempt, decay)
    return moving_average(values, attempt, request.width, needs_full_window=request.needs_full_window)[rows]


def _window(x: Places, request: CurveRequest) -> Integers:
    """Return the rows in the zoom window, and one row on each side of it, so that lines reach the edges."""
    if request.axis is Axis.ATTEMPT:  # x is not sorted over several attempts
        low = -math.inf if request.first is None else request.first
        high = math.inf if request.last is None else request.last
        return np.flatnonzero((x >= low) & (x <= high))
    first = 0 if request.first is None else max(0, int(np.searchsorted(x, request.first, "left")) - 1)
    last = len(x) if request.last is None else int(np.searchsorted(x, request.last, "right")) + 1
    return np.arange(first, min(last, len(x)))


def _bucket_width(history: History, x: Places, parts: Sequence[slice], request: CurveRequest) -> float | None:
    """Return the smallest power of two with which the buckets have at most `points` points; None to draw every row."""
    if request.newest is not None or len(x) <= request.points:
        return None
    buckets = max(1, request.points // _POINTS_PER_BUCKET, len(parts))
    least = 2.0**-10 if request.axis is Axis.TIME else 1.0
    width = max(least, 2.0 ** math.ceil(math.log2(max(float(x.max() - x.min()), least) / buckets) + 1))
    # Rows can be far apart: then half of the width still has few enough buckets.
    while width > least and sum(_bucket_count(history, x, rows, width / 2) for rows in parts) <= buckets:
        width /= 2
    return width


def _bucket_count(history: History, x: Places, rows: slice, width: float) -> int:
    """Return the number of buckets that contain any of the `rows`, which are sorted by `x` within an attempt."""
    return len(_bucket_begins(x[rows], history.attempt[rows], width))


def _bucket_begins(x: Places, attempt: Integers, width: float) -> Integers:
    """Return the first row of each bucket. A bucket ends at a restart, so that no row next to a restart is left out."""
    bounds = [0, *restarts(attempt).tolist(), len(x)]
    if len(x) and sum(abs(x[last - 1] - x[first]) for first, last in itertools.pairwise(bounds)) < width * len(x) / 8:
        parts = [first + _rising_begins(x[first:last], width) for first, last in itertools.pairwise(bounds)]
        return np.concatenate(parts)
    number = np.floor(x / width)
    return np.append(0, np.flatnonzero((number[1:] != number[:-1]) | (attempt[1:] != attempt[:-1])) + 1)[: len(x)]


def _rising_begins(x: Places, width: float) -> Integers:
    """Return the first row of each bucket of rising places, by a search for the edges of the buckets."""
    exact = x.dtype.type(width)  # integers above 2^53 are no floats
    edges = np.arange(x[0] // exact, x[-1] // exact + 1) * exact
    return np.unique(np.searchsorted(x, edges, "left"))


def _line(
    whole: History, begins: Integers, first: int, x: Places, width: float | None, *, request: CurveRequest
) -> Line:
    """Return the points of one line at the places `x` of adjacent rows, with a NaN where the line must break.

    `begins` has the first row of each attempt of `whole`; `first` is the first row of the line.
    """
    history = whole.select(slice(first, first + len(x)))
    axis = request.axis
    finite = np.isfinite(history.value)
    kept, low, high = _drawn(history, x, finite, width)
    broken = _breaks(history, x, finite, kept, axis)
    behind = kept[broken]
    # The point of a break is between its neighbours: at the first row that is not finite, or in the middle.
    gap = np.where(finite[behind + 1], x[behind] / 2 + x[kept[broken + 1]] / 2, x[behind + 1])
    place = broken + 1
    nothing = np.nan
    return Line(
        label=f"attempt {history.attempt[0]}" if axis is Axis.ATTEMPT else None,
        x=np.insert(x[kept].astype(np.float64), place, gap),
        step=np.insert(history.step[kept], place, history.step[behind + 1]),
        value=np.insert(history.value[kept], place, nothing),
        smoothed=np.insert(_average(whole, begins, first + kept, request), place, nothing),
        low=np.insert(low, place, nothing),
        high=np.insert(high, place, nothing),
    )


def _drawn(history: History, x: Places, finite: Any, width: float | None) -> tuple[Integers, Floats, Floats]:
    """Return the rows to draw, and the range of the bucket of each of them.

    They are all `finite` rows, or the first, lowest, highest and last one of each bucket.
    """
    rows = slice(None) if finite.all() else np.flatnonzero(finite)  # a slice needs no copies
    values, x = history.value[rows], x[rows]
    lowest, highest = history.lowest, history.highest
    if width is None or not len(values):
        kept = np.arange(len(x)) if isinstance(rows, slice) else rows
        return kept, lowest[rows], highest[rows]
    begins = _bucket_begins(x, history.attempt[rows], width)
    ends = np.append(begins[1:], len(values))
    parts = [(first, values[first:last]) for first, last in zip(begins.tolist(), ends.tolist(), strict=True)]
    least, most = (np.array([first + find(part) for first, part in parts]) for find in (np.argmin, np.argmax))
    drawn = np.unique(np.concatenate([begins, ends - 1, least, most]))
    bucket = np.searchsorted(begins, drawn, "right") - 1
    low = values[least] if lowest is history.value else np.fmin.reduceat(lowest[rows], begins)
    high = values[most] if highest is history.value else np.fmax.reduceat(highest[rows], begins)
    return drawn if isinstance(rows, slice) else rows[drawn], low[bucket], high[bucket]


def _breaks(history: History, x: Places, finite: Any, kept: Integers, axis: Axis) -> Integers:
    """Return the positions in `kept` behind which the line breaks: at non-finite values, restarts and pauses."""
    if len(kept) < 2:
        return np.array([], np.int64)
    broken = np.diff(history.attempt[kept]) > 0
    if not finite.all():
        broken |= np.diff(np.cumsum(~finite)[kept]) > 0
    if axis is Axis.TIME and len(x) > 2:
        gaps = np.diff(x)
        longest = np.maximum.reduceat(np.append(gaps, 0), kept)[:-1]  # between two drawn rows
        broken |= longest > _PAUSE_FACTOR * max(float(np.median(gaps)), 1e-6)
    found: Integers = np.flatnonzero(broken)
    return found


def _nonfinite(history: History, x: Places) -> tuple[NonfiniteRange, ...]:
    """Return the ranges of rows that are not finite. Near ranges are joined if there are more than _MOST_RANGES."""
    rows = np.flatnonzero(~np.isfinite(history.value))
    reach = 1
    while True:
        begins = np.flatnonzero(np.diff(rows, prepend=rows[:1] - reach - 1) > reach)
        if len(begins) <= _MOST_RANGES:
            break
        reach *= 2
    found = []
    for part in np.split(rows, begins[1:]) if len(rows) else []:
        first, last, values = int(part[0]), int(part[-1]), history.value[part]
        tests = {"NaN": np.isnan, "Inf": np.isinf}
        word = ", ".join(word for word, test in tests.items() if test(values).any())
        found.append(
            NonfiniteRange(
                first=float(x[first]),
                last=float(x[last]),
                first_step=int(history.step[first]),
                last_step=int(history.step[last]),
                rows=len(part),
                word=word,
            )
        )
    return tuple(found)


def _bulk(values: Floats) -> tuple[float, float] | None:
    """Return the cut range of a chart: that of most values, or of all values if that is not much larger."""
    known = np.isfinite(values)
    finite = values.copy() if known.all() else values[known]
    if not len(finite):
        return None
    low, high = float(finite.min()), float(finite.max())
    if len(finite) < 40:
        return low, high
    least, lower, upper, most = _quantiles(finite, (_BULK[0], 0.25, 0.75, _BULK[1]))
    fence = _FENCE * (upper - lower)
    near = (max(least, lower - fence), min(most, upper + fence))
    return (low, high) if near[1] - near[0] >= _BULK_SHARE * (high - low) else near


def _quantiles(values: Floats, shares: Sequence[float]) -> Iterator[float]:
    """Yield ascending quantiles, interpolated between two values as SQL's quantile_cont does. Reorder `values`."""
    places = [share * (len(values) - 1) for share in shares]
    ranks = [int(place) for place in places]
    _partition(values, ranks)
    for place, rank, end in zip(places, ranks, [*ranks[1:], len(values)], strict=True):
        low, high = values[rank], values[rank + 1 : end + 1].min()
        yield float(low + (high - low) * (place - rank))


def _partition(values: Floats, ranks: Sequence[int]) -> None:
    """Reorder `values` so that those at the ascending `ranks` are as in sorted ones, in half of the time of a sort."""
    if ranks:
        middle = len(ranks) // 2
        at = ranks[middle]
        values.partition(at)
        _partition(values[:at], ranks[:middle])
        _partition(values[at + 1 :], [one - at - 1 for one in ranks[middle + 1 :]])


LONGEST_WINDOW: Final = 500
"""Largest number of rows in a window of a moving average. The time of the calculation is proportional to it."""

_WINDOW_BITS: Final = 80
_WINDOW_RANGE: Final = 2.0**28
_WINDOWS_AT_ONCE: Final = 64
_WINDOW_SHARE: Final = 8
"""Averages at few rows: a window costs about a tenth of the time of as many averages in the order of the rows."""

_LARGEST_EXPONENT: Final = 200.0
"""Natural logarithm of the largest power of the decay in a block: e^200 is within the range of a double."""


def ema(values: Floats, series: Integers, decay: float) -> Floats:
    """Return the exponential moving average of `values`, NaN where a value is not finite.

    `decay` is the weight of the previous average, from 0 to below 1. Rows of a series, which have equal numbers in
    `series`, must be adjacent.
    """
    known = np.isfinite(values)
    begins = [0, *restarts(series).tolist()]
    if len(begins) == 1 and known.all():
        return _ema(values, decay)
    result = np.full(len(values), np.nan)
    for first, last in itertools.pairwise([*begins, len(values)]):
        finite = first + np.flatnonzero(known[first:last])
        result[finite] = _ema(values[finite], decay)
    return result


def ema_at(values: Floats, series: Integers, decay: float, rows: Integers) -> Floats:
    """Return `ema` at `rows`; of few rows, from windows before which all weights together are below 2^-80."""
    reach = 1 if decay <= 0 else math.ceil(-_WINDOW_BITS * math.log(2) / math.log(decay))
    largest = max(abs(values.max(initial=0)), abs(values.min(initial=0)))
    if reach >= len(values) or reach * len(rows) > _WINDOW_SHARE * len(values) or not math.isfinite(largest):
        return ema(values, series, decay)[rows]
    begins = np.append(0, restarts(series))
    begin = begins[np.searchsorted(begins, rows, "right") - 1]
    is_early = rows - begin < reach
    found = np.empty(len(rows))
    for first in np.unique(begin[is_early]).tolist():
        own = is_early & (begin == first)
        found[own] = _ema(values[first : first + reach], decay)[rows[own] - first]
    weights = decay ** np.arange(reach - 1, -1, -1.0)
    weights /= weights.sum()
    windows, late = np.lib.stride_tricks.sliding_window_view(values, reach), np.flatnonzero(~is_early)
    for own in np.array_split(late, len(late) // _WINDOWS_AT_ONCE + 1):
        copies = windows[rows[own] - reach + 1]
        found[own] = copies @ weights
        # A value before a window that is larger by far would still be seen in the average.
        if (largest > _WINDOW_RANGE * (np.abs(copies, out=copies) @ weights)).any():
            return ema(values, series, decay)[rows]
    return found


def moving_average(values: Floats, series: Integers, width: int, *, needs_full_window: bool = False) -> Floats:
    """Return the mean of the finite values of each row and the `width` - 1 rows before it, NaN at non-finite values.

    With `needs_full_window`, rows with fewer than `width` finite values have no average. Rows of a series must be
    adjacent, as for `ema`.
    """
    width = min(max(width, 1), LONGEST_WINDOW)
    known = np.isfinite(values)
    sums, counts = np.where(known, values, 0.0), known.astype(np.float64)
    total, count = sums.copy(), counts.copy()
    for back in range(1, min(width, len(values))):  # differences of running sums would lose digits behind a spike
        is_same = series[back:] == series[:-back]
        total[back:] += np.where(is_same, sums[:-back], 0.0)
        count[back:] += np.where(is_same, counts[:-back], 0.0)
    has_average = known & (count == width) if needs_full_window else known
    return np.where(has_average, total / np.maximum(count, 1.0), np.nan)


def _ema(values: Floats, decay: float) -> Floats:
    """Return the average of finite `values`; in a block, it is a power of `decay` times a sum of y / decay^i.

    It begins at 0, and is divided by the sum of the weights, 1 - decay^n of n values.
    """
    if decay <= 0:
        return values
    block = max(1, int(_LARGEST_EXPONENT / max(-math.log(decay), 1e-13)))
    result = np.empty(len(values))
    previous = 0.0
    powers = decay ** np.arange(1, min(block, len(values)) + 1)
    weights = (1 - decay) / powers
    for start in range(0, len(values), block):  # without arrays of the length of `values`, whose memory costs more
        part = values[start : start + block]
        own = result[start : start + block]
        np.multiply(part, weights[: len(part)], out=own)
        np.cumsum(own, out=own)
        own += previous
        own *= powers[: len(part)]
        previous = own[-1]
        own /= 1.0 - decay**start * powers[: len(part)]
    return result
