"""Draw a curve into a panel: raw and smoothed line, range, ranges of NaN, restarts, and values outside of the axis."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator

from rankscope_view.data.curves import Axis, Curve, CurveRequest, Smoothing, curve, on_axis
from rankscope_view.data.series import Floats, History
from rankscope_view.figures.style import BLUE, FAINT, GREY, NAN, RAW, RED, beside, formatter, plain, show_nothing
from rankscope_view.pages.format import count, number

AXIS_LABELS: Final = {
    Axis.STEP: "step",
    Axis.CUMULATIVE: "steps of all attempts",
    Axis.ATTEMPT: "step",
    Axis.ARRIVAL: "rows in order of arrival (labels: steps)",
    Axis.TIME: "hours since the first row",
}
_MARGIN: Final = 0.06
_FEW_DECADES: Final = 300.0
"""Ratio of the limits of a logarithmic axis below which 2 and 5 times the powers of ten have labels too."""

_NARROW: Final = 8.0
"""Ratio of these limits below which the labels are those of a linear axis."""

_MOST_LABELS: Final = 4
"""Largest number of ranges of NaN that have a label; further ones are only hatched."""


def request(
    axis: Axis, *, width: int = 0, smoothing: Smoothing = Smoothing.AVERAGE, needs_full_window: bool = False
) -> CurveRequest:
    """Return the request of a curve with an average, of `width` rows if it is a moving one; without one for 0 rows."""
    smoothing = smoothing if width else Smoothing.NONE
    return CurveRequest(axis=axis, smoothing=smoothing, width=max(width, 1), needs_full_window=needs_full_window)


def draw(
    axes: Axes, history: History, asked: CurveRequest, title: str, *, unit: str, dash: str = "-", name: str = "each row"
) -> Curve:
    """Draw the curve of `history` into `axes`, and return it. `dash` is the line style of the average.

    Without rows, the panel states that the `unit` is not logged.
    """
    axes.set_title(title)
    found = curve(history, asked)
    if not len(history):
        show_nothing(axes, f"no {unit} logged")
        return found
    for line in found.lines:
        x = scaled(line.x, found)
        if (line.high > line.low).any():
            axes.fill_between(x, line.low, line.high, color=RAW, alpha=0.18, linewidth=0, gid="range")
        axes.plot(x, line.value, color=BLUE, linewidth=1.1, label=name, gid="raw")
        _draw_single_points(axes, x, line.value, BLUE)
        if np.isfinite(line.smoothed).any():
            words = average_words(asked)
            axes.plot(x, line.smoothed, dash, color=RAW, alpha=0.7, linewidth=1.6, label=words, gid="average")
    hatch_nonfinite(axes, found)
    mark_restarts(axes, found)
    label_axis(axes, found, history)
    axes.set_ylabel(unit)
    return found


def average_words(asked: CurveRequest) -> str:
    """Return the name of the average of a curve, with its strength."""
    moving = f"moving average of {asked.width} rows"
    words = {Smoothing.EMA: f"EMA {asked.decay:g}", Smoothing.BOTH: f"EMA {asked.decay:g}, then {moving}"}
    return words.get(asked.smoothing, moving)


def scaled(x: Floats, found: Curve) -> Floats:
    """Return places on the axis; times become hours since the first row."""
    if found.request.axis is Axis.TIME and found.extent is not None:
        return (x - found.extent[0]) / 3600
    return x


def _draw_single_points(axes: Axes, x: Floats, value: Floats, color: str) -> None:
    """Draw a dot for each value between two breaks, which a line would not show."""
    known = np.isfinite(value)
    padded = np.concatenate(([False], known, [False]))
    alone = known & ~padded[:-2] & ~padded[2:]
    if alone.any():
        axes.plot(x[alone], value[alone], "o", markersize=4, color=color, gid="points")


def hatch_nonfinite(axes: Axes, found: Curve, *, name: str = "", low: float = 0.0, high: float = 1.0) -> None:
    """Hatch each range of rows that are NaN or infinite: a gap alone could also be an absent row.

    The label of a range begins with `name`. A range reaches from `low` to `high`, from 0 to 1 of the panel.
    """
    reach = 0.5 if found.request.axis is not Axis.TIME else 0.0
    for number_of_range, one in enumerate(found.nonfinite):
        first, last = scaled(np.array([one.first - reach, one.last + reach]), found).tolist()
        fill, edge = (NAN, 0.10), (NAN, 0.55)
        axes.axvspan(first, last, low, high, fc=fill, ec=edge, hatch="////", lw=0, zorder=0, gid="nonfinite")
        if number_of_range < _MOST_LABELS:
            steps = count(one.first_step)
            steps += "" if one.first_step == one.last_step else f"–{count(one.last_step)}"
            is_last = found.extent is not None and one.last > found.extent[0] + 0.8 * (
                found.extent[1] - found.extent[0]
            )
            height = (low + high) / 2 if low else 0.97 - 0.06 * number_of_range  # curves are rarely there
            beside(axes, f"{name}{one.word} {steps}", first if is_last else last, height, color=RED, is_left=is_last)


def mark_restarts(axes: Axes, found: Curve) -> None:
    """Draw a dashed line at each restart. At most three have a label."""
    places = scaled(np.array(found.restarts), found).tolist()
    for at, place in enumerate(places):
        axes.axvline(place, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)), gid="restart")
        if at < 3:
            beside(axes, "restart", place, 0.1, color=GREY)


def label_axis(axes: Axes, found: Curve, history: History) -> None:
    """Label the horizontal axis. On the axis of arrival, the labels are the steps of the rows."""
    axis = found.request.axis
    axes.set_xlabel(AXIS_LABELS[axis])
    if axis is not Axis.TIME:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(formatter(lambda value, _: count(value)))
    if axis is Axis.ARRIVAL and len(history):
        steps = dict(enumerate(history.step.tolist()))
        axes.xaxis.set_major_formatter(formatter(lambda value, _: count(steps[int(value)]) if value in steps else ""))


def limit_to_bulk(axes: Axes, history: History, found: Curve) -> None:
    """Limit the vertical axis to most values, and mark the places of the values outside with triangles at the edge."""
    rows, x = on_axis(history, found.request.axis)
    finite = np.isfinite(rows.value)
    if found.bulk is None or not finite.any():
        return
    low, high = found.bulk
    margin = _MARGIN * (high - low) or abs(high) * _MARGIN or 0.5
    # Outward to two digits of the range, so that the limits in the legend are short numbers.
    unit = 10.0 ** (math.floor(math.log10(high - low + 2 * margin)) - 1)
    low, high = math.floor((low - margin) / unit) * unit, math.ceil((high + margin) / unit) * unit
    axes.set_ylim(low, high)
    for edge, marker, word, outside in (
        (high, "^", "above", finite & (rows.value > high)),
        (low, "v", "below", finite & (rows.value < low)),
    ):
        if outside.any():
            values = rows.value[outside]
            extreme = number(float(values.max() if word == "above" else values.min()))
            label = f"{count(len(values))} value{'' if len(values) == 1 else 's'} {word} {edge:.4g}, up to {extreme}"
            places = scaled(x[outside], found), np.full(len(values), edge)
            axes.plot(*places, marker, markersize=4, color=FAINT, clip_on=False, label=label, gid=word)


def use_log_axis(axes: Axes, found: Curve) -> bool:
    """Use a logarithmic vertical axis, and return whether that is possible: some value must be positive."""
    if not any((line.value > 0).any() for line in found.lines):
        return False
    axes.set_yscale("log")
    label_log_axis(axes)
    return True


def label_log_axis(axes: Axes) -> None:
    """Label a logarithmic vertical axis, with several ticks also if its limits are close to each other."""
    low, high = axes.get_ylim()
    ratio = high / max(low, 1e-300)
    if ratio < _FEW_DECADES:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if ratio > _NARROW else MaxNLocator(5))
    axes.yaxis.set_major_formatter(formatter(plain))
    axes.yaxis.set_minor_formatter(formatter(lambda _value, _position: ""))
