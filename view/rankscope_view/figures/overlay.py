"""One scalar of several runs in one panel: raw values, a moving average, and a label at the end of each line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankscope_view.data.curves import Axis, Curve, Smoothing, curve, notice
from rankscope_view.data.series import History
from rankscope_view.figures import lines, style
from rankscope_view.pages.format import measure
from rankscope_view.pages.run import title as title_of

SIZE: Final = (15.0, 8.0)
AVERAGE_ROWS: Final = 20
_MARKERS: Final = ("o", "s", "^", "D", "v", "P")
_MARKED_ROWS: Final = 12
_LABEL_DISTANCE: Final = 0.035
_CHARACTER: Final = 0.0088
"""Width of a character of a label as a share of the width of the panel."""

_TEXT_SIZE: Final = 11.5


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
        figure = style.new_figure(*SIZE)
        axes: Axes = figure.subplots()
        known = [(label, history) for label, history in histories if np.isfinite(history.value).any()]
        runs = f"{len(known)} run{'' if len(known) == 1 else 's'}"
        axes.set_title(style.shown(title or f"{words} of {runs}"))
        if not known:
            style.show_nothing(axes, f"no run has a finite {words}")
            return figure
        asked = lines.request(axis, width=AVERAGE_ROWS if max(len(rows) for _, rows in known) > AVERAGE_ROWS else 0)
        curves = [(label, curve(history, asked)) for label, history in known]
        ends = [_draw(axes, label, found, number) for number, (label, found) in enumerate(curves)]
        _limit(axes, [found for _, found in curves], max(len(end.text) for end in ends))
        lines.label_axis(axes, curves[0][1], known[0][1])
        axes.set_ylabel(words)
        _label_ends(axes, ends)
        style.legend_below(axes)
        light = f" · light: {lines.average_words(asked)}" if asked.smoothing is not Smoothing.NONE else ""
        style.note(axes, f"line and number at its end: rows{light}")
        missing = [label for label, _ in histories if label not in dict(known)]
        remarks = [f"{label}: {notice(found)}" for label, found in curves]
        remarks += [f"{label}: no finite value" for label in missing]
        style.foot(figure, "\n".join(remarks[:8]))
    return figure


def _draw(axes: Axes, label: str, found: Curve, run: int) -> _End:
    """Draw the lines of the run with the number `run`, and return the label at its end."""
    color, dash = style.SERIES[run % len(style.SERIES)], style.DASHES[run % len(style.DASHES)]
    last = (0.0, 0.0)
    for number, line in enumerate(found.lines):
        every = max(1, len(line.x) // _MARKED_ROWS)
        axes.plot(
            line.x, line.value, color=color, linewidth=1.4, linestyle=dash, marker=_MARKERS[run % len(_MARKERS)],
            markevery=every, markersize=5, label=style.shown(label) if number == 0 else None, gid="raw",
        )  # fmt: skip
        axes.plot(line.x, line.smoothed, color=color, linewidth=2.4, alpha=0.35, gid="average")
        rows = np.flatnonzero(np.isfinite(line.value))
        if len(rows):
            last = float(line.x[rows[-1]]), float(line.value[rows[-1]])
    top = 1 - _LABEL_DISTANCE * run  # a strip for each run: NaN of one run does not cover the lines of others
    lines.hatch_nonfinite(axes, found, name=f"{label}: ", low=top - 0.025, high=top)
    ruin = "".join(one.word for one in found.nonfinite[-1:] if one.last > last[0])
    return _End(*last, f"{label}  {ruin or measure(last[1])}", color, is_ruined=bool(ruin))


def _limit(axes: Axes, curves: Sequence[Curve], longest: int) -> None:
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
