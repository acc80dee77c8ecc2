"""Heat maps of a grid: a statistic of tensors over steps, update sizes of parameters, and step times of ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.transforms import ScaledTranslation

from rankscope_view.data.grid import ABSENT as ABSENT_CELL
from rankscope_view.data.grid import INFINITE, LEVELS, NOT_A_NUMBER, Grid
from rankscope_view.figures import style
from rankscope_view.pages.format import count
from rankscope_view.pages.rendering import ticks

_MOST_LABELS: Final = 36
_STEP_LABELS: Final = 8
_LEGEND_INCHES: Final = -0.42
"""Place of the legend under the map, below the labels of the axis."""

_LONGEST_NAME: Final = 34
_LAYER: Final = re.compile(r"^(.*?\b(\d+))\b")


def heat_map(run: str, grid: Grid, *, title: str, unit: str) -> Figure:
    """Return the heat map of `grid`. NaN is hatched; absent cells are grey. `unit` is the label of the colour scale."""
    rows, columns = grid.cells.shape
    with style.style():
        height = min(12.0, max(3.6, 2.4 + 0.12 * min(rows, 48)))
        figure = style.new_figure(10.5, height)
        axes: Axes = figure.subplots()
        style.head(figure, run)
        axes.set_title(title)
        if not rows or not columns:
            style.show_nothing(axes, grid.notice)
            return figure
        axes.grid(visible=False)
        axes.imshow(_colors(grid), aspect="auto", interpolation="nearest", extent=(0, columns, rows, 0))
        _hatch(axes, grid)
        _label_rows(axes, grid)
        _label_steps(axes, grid)
        _scale(figure, axes, grid, unit)
        style.note(axes, grid.notice)
        _legend(figure, axes, grid)
        if grid.first_bad is not None:
            style.foot(figure, _first_bad(grid, *grid.first_bad))
    return figure


def _first_bad(grid: Grid, row: int, column: int) -> str:
    """Return the sentence about the first column with a value that is not finite."""
    rows = np.flatnonzero(grid.cells[:, column] >= INFINITE)
    first, last = grid.steps[column], grid.last_steps[column]
    steps = f"step {count(first)}" if first == last else f"steps {count(first)} to {count(last)}"
    more = f" and {count(len(rows) - 1)} more rows" if len(rows) > 1 else ""
    return f"first values that are not finite: {steps}, {grid.names[grid.rows[row][2]]}{more}"


def _colors(grid: Grid) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return the colour of each cell as an array of rows × columns × 4."""
    table = np.zeros((256, 4))
    table[: LEVELS + 1] = mpl.colormaps["viridis"](np.linspace(0, 1, LEVELS + 1))
    for code, color in ((ABSENT_CELL, style.ABSENT), (INFINITE, style.INF), (NOT_A_NUMBER, style.NAN)):
        table[code] = to_rgba(color)
    colors: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = table[grid.cells]
    return colors


def _hatch(axes: Axes, grid: Grid) -> None:
    """Hatch the cells with NaN, one rectangle for each run of cells in a row, or of rows that are equal."""
    is_bad = grid.cells == NOT_A_NUMBER
    if not is_bad.any():
        return
    x = np.repeat(np.arange(is_bad.shape[1] + 1), 2)[1:-1]
    y = np.repeat(np.arange(is_bad.shape[0] + 1), 2)[1:-1]
    mask = np.repeat(np.repeat(is_bad, 2, axis=0), 2, axis=1).astype(float)
    filled = axes.contourf(x, y, mask, levels=[0.5, 1.5], colors="none", hatches=["/////"])
    filled.set_edgecolor(style.INK)
    filled.set_linewidth(0)
    axes.set_ylim(is_bad.shape[0], 0)


def _label_rows(axes: Axes, grid: Grid) -> None:
    """Label all rows, or the first row of each layer, or evenly distributed rows if there are too many."""
    names = [grid.names[extreme] for *_, extreme in grid.rows]
    names = _without_common_ends(names)
    if len(names) <= _MOST_LABELS:
        axes.set_yticks(np.arange(len(names)) + 0.5, [_short(name) for name in names])
        return
    layers = [found[1] if (found := _LAYER.match(name)) else name for name in names]
    starts = [at for at, layer in enumerate(layers) if at == 0 or layer != layers[at - 1]]
    labels = layers
    if len(starts) > len(names) // 2:  # no layers in the names
        starts, labels = list(range(len(names))), names
    shown_rows = [starts[0]]
    for at in starts:
        if at - shown_rows[-1] >= len(names) / _MOST_LABELS:
            shown_rows.append(at)
    axes.set_yticks([at + 0.5 for at in shown_rows], [_short(labels[at]) for at in shown_rows])


def _without_common_ends(names: Sequence[str]) -> list[str]:
    """Return names without the parts at their beginning and end that all of them share."""
    parts = [name.split(".") for name in names]
    if len(names) < 2:
        return list(names)
    most = min(map(len, parts)) - 1
    first = next((at for at in range(most) if len({one[at] for one in parts}) > 1), most)
    last = next((at for at in range(most - first) if len({one[-1 - at] for one in parts}) > 1), most - first)
    return [".".join(one[first : len(one) - last]) for one in parts]


def _short(name: str) -> str:
    """Return a name whose inner parts are cut to three letters, one after the other, until it is short enough."""
    parts = name.split(".")
    for at in range(len(parts) - 1):
        if len(".".join(parts)) > _LONGEST_NAME:
            parts[at] = parts[at][:3]
    name, half = ".".join(parts), _LONGEST_NAME // 2
    return style.shown(name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[-half:]}")


def _label_steps(axes: Axes, grid: Grid) -> None:
    """Label columns with their steps, and mark the first column of each later attempt."""
    places = _round_columns(grid)
    axes.set_xticks([at + 0.5 for at in places], [count(grid.steps[at]) for at in places])
    axes.set_xlabel("step (columns in order of arrival)" if len(set(grid.attempts)) > 1 else "step")
    for at in (np.flatnonzero(np.diff(grid.attempts)) + 1).tolist():
        axes.axvline(at, color="white", linestyle=(0, (4, 3)), linewidth=1.2, gid="restart")
        style.beside(axes, f"restart at {count(grid.steps[at])}", at, 0.97, color="white", has_halo=False)


def _round_columns(grid: Grid) -> list[int]:
    """Return the columns at which the steps reach a round number. Steps go back at a restart."""
    low, high = min(grid.steps), max(grid.steps)
    wanted = ticks(low, high, _STEP_LABELS) if high > low else [float(low)]
    width = wanted[1] - wanted[0] if len(wanted) > 1 else 1.0
    found: list[int] = []
    for at, step in enumerate(grid.steps):
        before = grid.steps[at - 1] if at else step - 1
        is_round = step % width == 0 or (at > 0 and step > before and step // width > before // width)
        if is_round and (not found or at - found[-1] >= len(grid.steps) / _STEP_LABELS / 2):
            found.append(at)
    return found or [0]


def _scale(figure: Figure, axes: Axes, grid: Grid, unit: str) -> None:
    """Draw the colour scale; a logarithmic one has a label for each decade."""
    low, high = grid.scale
    bar = figure.colorbar(
        ScalarMappable(Normalize(low, high), "viridis"), ax=axes, pad=0.015, fraction=0.03, aspect=30, extend="both"
    )
    bar.outline.set_visible(False)
    if grid.is_log:
        decades = np.arange(np.ceil(low), np.floor(high) + 1)
        ticks = decades if len(decades) > 1 else np.linspace(low, high, 4)
        bar.set_ticks(ticks.tolist(), labels=[_power(float(tick)) for tick in ticks])
    bar.set_label(unit)


def _power(exponent: float) -> str:
    value = 10.0**exponent
    return f"{value:,.4g}" if 1e-4 <= value < 1e4 else style.scientific(value)


def _legend(figure: Figure, axes: Axes, grid: Grid) -> None:
    keys = (
        (NOT_A_NUMBER, Patch(facecolor=style.NAN, hatch="/////", edgecolor=style.INK, linewidth=0, label="NaN")),
        (INFINITE, Patch(facecolor=style.INF, edgecolor=style.LINE, label="infinite")),
        (ABSENT_CELL, Patch(facecolor=style.ABSENT, edgecolor=style.LINE, label="absent")),
    )
    found = [patch for code, patch in keys if (grid.cells == code).any()]
    if found:
        below = axes.transAxes + ScaledTranslation(0, _LEGEND_INCHES, figure.dpi_scale_trans)
        axes.legend(
            handles=found, loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=below, ncols=3, frameon=False
        )
