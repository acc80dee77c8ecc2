"""The overview of a run: loss, learning rate, gradient norm and the distribution of losses, in four panels."""

from __future__ import annotations

from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankscope_view.data.curves import Axis, Curve, Smoothing, notice
from rankscope_view.data.detail import RunDetail
from rankscope_view.data.series import GRAD_NORM, LEARNING_RATE, LOSS, Floats, History
from rankscope_view.data.summary import losses_of
from rankscope_view.figures import lines, style
from rankscope_view.pages.format import count, measure

SIZE: Final = (15.0, 10.0)
BINS: Final = 30
_FEWEST_ROWS: Final = 20
_SMOOTHED_ROWS: Final = 10
_TEXT_SIZE: Final = 11.5


def overview(
    detail: RunDetail, *, axis: Axis = Axis.STEP, smoothing: Smoothing = Smoothing.AVERAGE, is_cut: bool = False
) -> Figure:
    """Return the overview of a run: a figure of 15 × 10 inches with 2 × 2 panels."""
    loss = detail.history(LOSS)
    with style.style(_TEXT_SIZE):
        figure = style.new_figure(*SIZE)
        ((upper_left, upper_right), (lower_left, lower_right)) = figure.subplots(2, 2)
        curves = [
            _loss_panel(upper_left, loss, axis, smoothing, is_cut=is_cut),
            _rate_panel(upper_right, detail.history(LEARNING_RATE), axis),
            _norm_panel(lower_left, detail.history(GRAD_NORM), axis),
        ]
        _histogram(lower_right, loss)
        style.head(figure, detail.row.run, _facts(detail, loss))
        style.foot(figure, reduction(curves))
    return figure


def reduction(curves: list[Curve]) -> str:
    """Return the sentence about the reduction of the first curve that has rows."""
    return next((notice(one) for one in curves if one.rows), "no rows stored")


def average_width(rows: int) -> int:
    """Return the number of rows of the moving average: min(10, rows // 10); 0, without average, below 20."""
    return min(_SMOOTHED_ROWS, rows // 10) if rows >= _FEWEST_ROWS else 0


def _facts(detail: RunDetail, loss: History) -> str:
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
    asked = lines.request(axis, width=width, smoothing=smoothing, needs_full_window=True)
    found = lines.draw(axes, loss, asked, "Loss", unit="loss")
    if is_cut:
        lines.limit_to_bulk(axes, loss, found)
    if len(loss):
        style.legend_below(axes)
        style.note(axes, "mean of all ranks, shaded: lowest to highest rank" if loss.is_varied else "")
    return found


def _rate_panel(axes: Axes, rate: History, axis: Axis) -> Curve:
    found = lines.draw(axes, rate, lines.request(axis), "Learning rate", unit="learning rate")
    axes.yaxis.set_major_formatter(style.formatter(style.scientific))
    if (rate.value[np.isfinite(rate.value)] >= 0).all():
        axes.set_ylim(bottom=0)
    return found


def _norm_panel(axes: Axes, norm: History, axis: Axis) -> Curve:
    found = lines.draw(axes, norm, lines.request(axis), "Gradient norm", unit="gradient norm")
    if lines.use_log_axis(axes, found):
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
    lines.label_log_axis(axes)
    median = float(np.median(finite))
    axes.axvline(median, color=style.ORANGE, linewidth=1.2)
    style.beside(axes, f"median {measure(median)}", median, 0.96, color=style.ORANGE)
    style.note(axes, f"{len(edges) - 1} bins, {count(len(finite))} finite of {count(len(values))} rows, log axis")
    axes.set_xlabel("loss")
    axes.set_ylabel("rows")
