"""Figures of curves: the overview of a run, its loss and throughput, and one scalar of several runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from rankscope_view.data.curves import Axis, Curve, CurveRequest, Smoothing, curve, notice, on_axis
from rankscope_view.data.detail import RunDetail
from rankscope_view.data.events import Group, markers
from rankscope_view.data.series import EVAL_LOSS, GRAD_NORM, LEARNING_RATE, LOSS, Floats, History
from rankscope_view.data.speed import Throughput
from rankscope_view.data.summary import losses_of
from rankscope_view.figures import style
from rankscope_view.pages.format import count, measure, number, short
from rankscope_view.pages.run import title as title_of

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
        style.show_nothing(axes, f"no {unit} logged")
        return found
    for line in found.lines:
        x = scaled(line.x, found)
        if (line.high > line.low).any():
            axes.fill_between(x, line.low, line.high, color=style.RAW, alpha=0.18, linewidth=0, gid="range")
        axes.plot(x, line.value, color=style.BLUE, linewidth=1.1, label=name, gid="raw")
        _draw_single_points(axes, x, line.value, style.BLUE)
        if np.isfinite(line.smoothed).any():
            words = average_words(asked)
            axes.plot(x, line.smoothed, dash, color=style.RAW, alpha=0.7, linewidth=1.6, label=words, gid="average")
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
        fill, edge = (style.NAN, 0.10), (style.NAN, 0.55)
        axes.axvspan(first, last, low, high, fc=fill, ec=edge, hatch="////", lw=0, zorder=0, gid="nonfinite")
        if number_of_range < _MOST_LABELS:
            steps = count(one.first_step)
            steps += "" if one.first_step == one.last_step else f"–{count(one.last_step)}"
            is_last = found.extent is not None and one.last > found.extent[0] + 0.8 * (
                found.extent[1] - found.extent[0]
            )
            height = (low + high) / 2 if low else 0.97 - 0.06 * number_of_range  # curves are rarely there
            style.beside(
                axes, f"{name}{one.word} {steps}", first if is_last else last, height, color=style.RED, is_left=is_last
            )


def mark_restarts(axes: Axes, found: Curve) -> None:
    """Draw a dashed line at each restart. At most three have a label."""
    places = scaled(np.array(found.restarts), found).tolist()
    for at, place in enumerate(places):
        axes.axvline(place, color=style.GREY, linewidth=0.9, linestyle=(0, (4, 3)), gid="restart")
        if at < 3:
            style.beside(axes, "restart", place, 0.1, color=style.GREY)


def label_axis(axes: Axes, found: Curve, history: History) -> None:
    """Label the horizontal axis. On the axis of arrival, the labels are the steps of the rows."""
    axis = found.request.axis
    axes.set_xlabel(AXIS_LABELS[axis])
    if axis is not Axis.TIME:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(lambda value, _: count(value))
    if axis is Axis.ARRIVAL and len(history):
        steps = dict(enumerate(history.step.tolist()))
        axes.xaxis.set_major_formatter(lambda value, _: count(steps[int(value)]) if value in steps else "")


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
            places = scaled(x[outside].astype(np.float64), found), np.full(len(values), edge)
            axes.plot(*places, marker, markersize=4, color=style.FAINT, clip_on=False, label=label, gid=word)


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
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


_OVERVIEW_SIZE: Final = (15.0, 10.0)
BINS: Final = 30
_FEWEST_ROWS: Final = 20
_MOST_AVERAGED: Final = 10
_TEXT_SIZE: Final = 11.5


def overview(
    detail: RunDetail, *, axis: Axis = Axis.STEP, smoothing: Smoothing = Smoothing.AVERAGE, is_cut: bool = False
) -> Figure:
    """Return the overview of a run: a figure of 15 × 10 inches with 2 × 2 panels."""
    loss = detail.history(LOSS)
    with style.style(_TEXT_SIZE):
        figure = style.new_figure(*_OVERVIEW_SIZE)
        ((upper_left, upper_right), (lower_left, lower_right)) = figure.subplots(2, 2)
        curves = [
            _loss_panel(upper_left, loss, axis, smoothing, is_cut=is_cut),
            _rate_panel(upper_right, detail.history(LEARNING_RATE), axis),
            _norm_panel(lower_left, detail.history(GRAD_NORM), axis),
        ]
        _histogram(lower_right, loss)
        style.head(figure, detail.row.run, _overview_facts(detail, loss))
        style.foot(figure, reduction(curves))
    return figure


def reduction(curves: list[Curve]) -> str:
    """Return the sentence about the reduction of the first curve that has rows."""
    return next((notice(one) for one in curves if one.rows), "no rows stored")


def average_width(rows: int) -> int:
    """Return the number of rows of the moving average: min(10, rows // 10); 0, without average, below 20."""
    return min(_MOST_AVERAGED, rows // 10) if rows >= _FEWEST_ROWS else 0


def _overview_facts(detail: RunDetail, loss: History) -> str:
    row = detail.row
    planned = "" if not row.planned_steps else f" of {count(row.planned_steps)}"
    parts = [] if row.step is None else [f"step {count(row.step)}{planned}"]
    losses = losses_of(loss)
    if losses.lowest is not None:
        parts.append(f"loss {measure(losses.current)}, lowest {measure(losses.lowest)}")
    if losses.nonfinite:
        parts.append(f"{count(losses.nonfinite)} rows NaN or infinite")
    return " · ".join(parts)


def _loss_panel(axes: Axes, loss: History, axis: Axis, smoothing: Smoothing, *, is_cut: bool) -> Curve:
    width = average_width(int(loss.stands.sum()))
    asked = request(axis, width=width, smoothing=smoothing, needs_full_window=True)
    found = draw(axes, loss, asked, "Loss", unit="loss")
    if is_cut:
        limit_to_bulk(axes, loss, found)
    if len(loss):
        style.legend_below(axes)
        style.note(axes, "mean of all ranks, shaded: lowest to highest rank" if loss.is_varied else "")
    return found


def _rate_panel(axes: Axes, rate: History, axis: Axis) -> Curve:
    found = draw(axes, rate, request(axis), "Learning rate", unit="learning rate")
    axes.yaxis.set_major_formatter(style.scientific)
    if (rate.value[np.isfinite(rate.value)] >= 0).all():
        axes.set_ylim(bottom=0)
    return found


def _norm_panel(axes: Axes, norm: History, axis: Axis) -> Curve:
    found = draw(axes, norm, request(axis), "Gradient norm", unit="gradient norm")
    if use_log_axis(axes, found):
        zeros = int((norm.value <= 0).sum())
        style.note(axes, "log axis" + (f", without {count(zeros)} rows of 0" if zeros else ""))
    return found


def _edges(values: Floats) -> Floats:
    """Return the edges of 30 bins; of one bin if the values differ by too little for 30 different edges."""
    low, high = float(values.min()), float(values.max())
    size = max(abs(low), abs(high), 1.0)
    if high - low > size * 1e-9:
        return np.linspace(low, high, BINS + 1)
    return np.array([low - size * 1e-6, high + size * 1e-6])


def _histogram(axes: Axes, loss: History) -> None:
    axes.set_title("Distribution of losses")
    values = loss.value[loss.stands]
    finite = values[np.isfinite(values)]
    if not len(finite):
        style.show_nothing(axes, "no finite loss")
        return
    edges = _edges(finite)
    axes.hist(finite, bins=edges.tolist(), color=style.BLUE, alpha=0.85, edgecolor="white", linewidth=0.6)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.7)
    label_log_axis(axes)
    median = float(np.median(finite))
    axes.axvline(median, color=style.ORANGE, linewidth=1.2)
    style.beside(axes, f"median {measure(median)}", median, 0.96, color=style.ORANGE)
    style.note(axes, f"{len(edges) - 1} bins, {count(len(finite))} finite of {count(len(values))} rows, log axis")
    axes.set_xlabel("loss")
    axes.set_ylabel("rows")


_SPEED_SIZE: Final = (8.0, 6.0)
AVERAGE_ROWS: Final = 20
_HEIGHT_OF_LOSS: Final = 3.6


def loss_and_throughput(
    detail: RunDetail,
    throughput: Throughput | None,
    *,
    axis: Axis = Axis.STEP,
    smoothing: Smoothing = Smoothing.AVERAGE,
    is_cut: bool = False,
) -> Figure:
    """Return a figure of 8 × 6 inches with loss and throughput. Without a throughput, it has only the loss."""
    with style.style():
        figure = style.new_figure(_SPEED_SIZE[0], _SPEED_SIZE[1] if throughput else _HEIGHT_OF_LOSS)
        heights = [3, 2] if throughput else [1]
        panels = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
        width = AVERAGE_ROWS if len(detail.history(LOSS)) > AVERAGE_ROWS else 0
        asked = request(axis, width=width, smoothing=smoothing)
        curves = [
            _loss_and_rate_panel(panels[0], detail.history(LOSS), detail.history(LEARNING_RATE), asked, is_cut=is_cut)
        ]
        if throughput is not None:
            drawn = _throughput_panel(panels[1], throughput, axis)
            _mark_events(panels[1], detail, throughput.history, drawn)
            panels[0].set_xlabel("")
            style.legend_below(panels[1])
            curves.append(drawn)
        style.head(figure, detail.row.run)
        style.foot(figure, reduction(curves))
    return figure


def _loss_and_rate_panel(axes: Axes, loss: History, rate: History, asked: CurveRequest, *, is_cut: bool) -> Curve:
    found = draw(axes, loss, asked, "Loss", unit="loss", dash="--")
    if not len(loss):
        return found
    if is_cut:
        limit_to_bulk(axes, loss, found)
    handles, labels = axes.get_legend_handles_labels()
    if len(rate):
        second = _rate_axis(axes, rate, asked.axis)
        more = second.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    style.legend_below(axes, dict(zip(labels, handles, strict=True)))
    return found


def _rate_axis(axes: Axes, rate: History, axis: Axis) -> Axes:
    """Draw the learning rate on a second vertical axis at the right, and return this axis."""
    second: Axes = axes.twinx()
    second.grid(visible=False)
    found = curve(rate, request(axis))
    for line in found.lines:
        x = scaled(line.x, found)
        second.plot(x, line.value, color=style.OLIVE, linewidth=1.2, label="learning rate (right axis)", gid="rate")
    highest = float(np.nanmax(rate.value, initial=0.0))
    second.set_ylim(0, highest * 1.35 or 1.0)
    second.yaxis.set_major_locator(MaxNLocator(4))
    second.yaxis.set_major_formatter(style.scientific)
    second.tick_params(colors=style.OLIVE)
    second.set_ylabel("learning rate", color=style.OLIVE)
    return second


def _throughput_panel(axes: Axes, throughput: Throughput, axis: Axis) -> Curve:
    asked, unit = request(axis), throughput.unit
    found = draw(axes, throughput.history, asked, "Throughput", unit=unit, name="throughput")
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    low = throughput.low
    if low is not None:
        x, value = (np.concatenate([getattr(line, name) for line in found.lines]) for name in ("x", "value"))
        places = scaled(x[value < low], found), value[value < low]
        text = f"{count(throughput.rows_below)} row{'' if throughput.rows_below == 1 else 's'} below P10 = {short(low)}"
        axes.plot(*places, "o", markersize=2.6, color=style.RED, alpha=0.7, label=text, gid="below")
        axes.axhline(low, color=style.RED, linewidth=0.8, linestyle=style.DASHES[1], label="P10")
        axes.set_ylim(0, 1.12 * float(throughput.finite.max()))
    source = "" if throughput.source == throughput.name else f"from {throughput.source}"
    mean = f"mean of {throughput.ranks} ranks" if throughput.ranks > 1 else ""
    style.note(axes, " · ".join(filter(None, (source, mean))))
    return found


def _mark_events(axes: Axes, detail: RunDetail, history: History, drawn: Curve) -> None:
    """Mark checkpoints and evaluations at the lower edge, because dips of the throughput there are normal."""
    found = markers(detail.lines, detail.history(EVAL_LOSS), history, drawn.request.axis)
    for group, marker, color in ((Group.CHECKPOINT, "d", style.OLIVE), (Group.EVALUATION, "|", style.GREEN)):
        places = scaled(np.array([one.x for one in found if one.group is group]), drawn)
        if len(places):
            label = f"{count(len(places))} {group}{'' if len(places) == 1 else 's'}"
            low, lane = np.full(len(places), 0.03), axes.get_xaxis_transform()
            axes.plot(places, low, marker, markersize=5, transform=lane, color=color, label=label, gid=group)


_OVERLAY_SIZE: Final = (15.0, 8.0)
_MARKERS: Final = ("o", "s", "^", "D", "v", "P")
_MARKED_ROWS: Final = 12
_LABEL_DISTANCE: Final = 0.035
_CHARACTER: Final = 0.0088
"""Width of a character of a label as a share of the width of the panel."""


@dataclass(frozen=True, slots=True)
class _End:
    """Label at the end of a line."""

    x: float
    value: float
    text: str
    color: str
    is_ruined: bool  # it is at the last finite value, which values of NaN or Inf follow


def overlay(
    name: str, histories: Sequence[tuple[str, History]], *, axis: Axis = Axis.STEP, title: str | None = None
) -> Figure:
    """Return a figure of 15 × 8 inches with the scalar `name` of several runs, which are pairs of a label and rows.

    `title` replaces the name and the number of the runs. The runs differ by colour, line style and marker, so that a
    grey print distinguishes them.
    """
    words = title_of(name)
    if name.endswith("_bytes"):
        histories = [(label, replace(rows, value=rows.value / 2.0**30)) for label, rows in histories]
        words = f"{words.removesuffix(', bytes')}, GiB"
    with style.style(_TEXT_SIZE):
        figure = style.new_figure(*_OVERLAY_SIZE)
        axes: Axes = figure.subplots()
        known = [(label, history) for label, history in histories if np.isfinite(history.value).any()]
        runs = f"{len(known)} run{'' if len(known) == 1 else 's'}"
        axes.set_title(style.shown(title or f"{words} of {runs}"))
        if not known:
            style.show_nothing(axes, f"no run has a finite {words}")
            return figure
        asked = request(axis, width=AVERAGE_ROWS if max(len(rows) for _, rows in known) > AVERAGE_ROWS else 0)
        curves = [(label, curve(history, asked)) for label, history in known]
        ends = [_draw_run(axes, label, found, number) for number, (label, found) in enumerate(curves)]
        _limit_to_all(axes, [found for _, found in curves], max(len(end.text) for end in ends))
        label_axis(axes, curves[0][1], known[0][1])
        axes.set_ylabel(words)
        _label_ends(axes, ends)
        style.legend_below(axes)
        light = f" · light: {average_words(asked)}" if asked.smoothing is not Smoothing.NONE else ""
        style.note(axes, f"line and number at its end: rows{light}")
        missing = [label for label, _ in histories if label not in dict(known)]
        remarks = [f"{label}: {notice(found)}" for label, found in curves]
        remarks += [f"{label}: no finite value" for label in missing]
        style.foot(figure, "\n".join(remarks[:8]))
    return figure


def _draw_run(axes: Axes, label: str, found: Curve, run: int) -> _End:
    """Draw the lines of the run with the number `run`, and return the label at its end."""
    color, dash = style.SERIES[run % len(style.SERIES)], style.DASHES[run % len(style.DASHES)]
    last = (0.0, 0.0)
    for place, line in enumerate(found.lines):
        every = max(1, len(line.x) // _MARKED_ROWS)
        axes.plot(
            line.x, line.value, color=color, linewidth=1.4, linestyle=dash, marker=_MARKERS[run % len(_MARKERS)],
            markevery=every, markersize=5, label=style.shown(label) if place == 0 else None, gid="raw",
        )  # fmt: skip
        axes.plot(line.x, line.smoothed, color=color, linewidth=2.4, alpha=0.35, gid="average")
        rows = np.flatnonzero(np.isfinite(line.value))
        if len(rows):
            last = float(line.x[rows[-1]]), float(line.value[rows[-1]])
    top = 1 - _LABEL_DISTANCE * run  # a strip for each run: NaN of one run does not cover the lines of others
    hatch_nonfinite(axes, found, name=f"{label}: ", low=top - 0.025, high=top)
    ruin = "".join(one.word for one in found.nonfinite[-1:] if one.last > last[0])
    return _End(*last, f"{label}  {ruin or measure(last[1])}", color, is_ruined=bool(ruin))


def _limit_to_all(axes: Axes, curves: Sequence[Curve], longest: int) -> None:
    """Limit the vertical axis to all values, and leave space at the right for `longest` characters."""
    ranges = [found.range() for found in curves]
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    margin = 0.06 * (high - low) or abs(high) * 0.06 or 0.5
    axes.set_ylim(low - margin, high + margin)
    extents = [found.extent for found in curves if found.extent is not None]
    first, last = min(first for first, _ in extents), max(last for _, last in extents)
    span = (last - first) or 1.0
    axes.set_xlim(first - 0.02 * span, last + (0.03 + _CHARACTER * longest) * span)


def _label_ends(axes: Axes, ends: Sequence[_End]) -> None:
    """Write the labels at the ends of the lines, moved apart vertically where one would cover another."""
    (bottom, top), (first, last), right = axes.get_ylim(), axes.get_xlim(), max(end.x for end in ends)
    placed: list[tuple[float, float]] = []
    for end in sorted(ends, key=lambda end: end.value):
        height = min(0.99, max(0.01, (end.value - bottom) / (top - bottom)))
        reach = _CHARACTER * len(end.text) * (last - first)
        near = [other for x, other in placed if abs(x - end.x) < reach and other > height - _LABEL_DISTANCE]
        height = max([height, *(other + _LABEL_DISTANCE for other in near)])
        placed.append((end.x, height))
        axes.annotate(
            style.shown(end.text), (end.x, height), xycoords=("data", "axes fraction"), color=end.color,
            xytext=(8, 0 if end.x == right or end.is_ruined else 14), textcoords="offset points", va="center",
            annotation_clip=False, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
        )  # fmt: skip
