"""A figure of one scalar of a run, with one line for each of its labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankscope_view.data.curves import Axis, notice
from rankscope_view.data.history import History
from rankscope_view.figures import lines
from rankscope_view.figures.overlay import overlay
from rankscope_view.figures.style import foot, head, new_figure, note, shown, style

SIZE: Final = (12.0, 6.0)


def metric_figure(run: str, name: str, histories: Sequence[tuple[str, History]], *, axis: Axis = Axis.STEP) -> Figure:
    """Return the figure of the scalar `name` of `run`. `histories` has a label and the rows of each line."""
    if len(histories) > 1:
        return overlay(name, histories, axis=axis, title=f"{run}: {name}")
    history = histories[0][1]
    with style():
        figure = new_figure(*SIZE)
        axes: Axes = figure.subplots()
        head(figure, run)
        axes.set_title(shown(name))
        found = lines.draw(axes, history, lines.request(axis), unit=shown(name))
        bad = int((~np.isfinite(history.value)).sum())
        note(axes, "mean of all ranks, shaded: lowest to highest rank" if history.is_varied else "")
        foot(figure, notice(found) + (f"; {bad} of them NaN or infinite" if bad else ""))
    return figure
