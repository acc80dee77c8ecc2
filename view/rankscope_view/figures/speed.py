"""Loss and throughput of a run: moving average, learning rate on a second axis, and rows below P10."""

from __future__ import annotations

from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rankscope_view.data.curves import Axis, Curve, CurveRequest, Smoothing, curve
from rankscope_view.data.detail import RunDetail
from rankscope_view.data.events import Group, markers
from rankscope_view.data.series import EVAL_LOSS, LEARNING_RATE, LOSS, History
from rankscope_view.data.speed import Throughput
from rankscope_view.figures import lines, style
from rankscope_view.figures.overview import reduction
from rankscope_view.pages.format import count, short

SIZE: Final = (8.0, 6.0)
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
        figure = style.new_figure(SIZE[0], SIZE[1] if throughput else _HEIGHT_OF_LOSS)
        heights = [3, 2] if throughput else [1]
        panels = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
        width = AVERAGE_ROWS if len(detail.history(LOSS)) > AVERAGE_ROWS else 0
        asked = lines.request(axis, width=width, smoothing=smoothing)
        curves = [_loss_panel(panels[0], detail.history(LOSS), detail.history(LEARNING_RATE), asked, is_cut=is_cut)]
        if throughput is not None:
            drawn = _throughput_panel(panels[1], throughput, axis)
            _mark_events(panels[1], detail, throughput.history, drawn)
            panels[0].set_xlabel("")
            style.legend_below(panels[1])
            curves.append(drawn)
        style.head(figure, detail.row.run)
        style.foot(figure, reduction(curves))
    return figure


def _loss_panel(axes: Axes, loss: History, rate: History, asked: CurveRequest, *, is_cut: bool) -> Curve:
    found = lines.draw(axes, loss, asked, "Loss", unit="loss", dash="--")
    if not len(loss):
        return found
    if is_cut:
        lines.limit_to_bulk(axes, loss, found)
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
    found = curve(rate, lines.request(axis))
    for line in found.lines:
        x = lines.scaled(line.x, found)
        second.plot(x, line.value, color=style.OLIVE, linewidth=1.2, label="learning rate (right axis)", gid="rate")
    highest = float(np.nanmax(rate.value, initial=0.0))
    second.set_ylim(0, highest * 1.35 or 1.0)
    second.yaxis.set_major_locator(MaxNLocator(4))
    second.yaxis.set_major_formatter(style.formatter(style.scientific))
    second.tick_params(colors=style.OLIVE)
    second.set_ylabel("learning rate", color=style.OLIVE)
    return second


def _throughput_panel(axes: Axes, throughput: Throughput, axis: Axis) -> Curve:
    asked, unit = lines.request(axis), throughput.unit
    found = lines.draw(axes, throughput.history, asked, "Throughput", unit=unit, name="throughput")
    axes.yaxis.set_major_formatter(style.formatter(lambda value, _: short(value)))
    low = throughput.low
    if low is not None:
        x, value = (np.concatenate([getattr(line, name) for line in found.lines]) for name in ("x", "value"))
        places = lines.scaled(x[value < low], found), value[value < low]
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
        places = lines.scaled(np.array([one.x for one in found if one.group is group]), drawn)
        if len(places):
            label = f"{count(len(places))} {group}{'' if len(places) == 1 else 's'}"
            low, lane = np.full(len(places), 0.03), axes.get_xaxis_transform()
            axes.plot(places, low, marker, markersize=5, transform=lane, color=color, label=label, gid=group)
