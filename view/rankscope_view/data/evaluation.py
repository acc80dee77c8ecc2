"""The curve of the evaluation loss, with the training loss behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from rankscope_view.data.curves import Axis, Curve, CurveRequest, Line, Role, Smoothing, curve
from rankscope_view.data.series import Floats, History

_DECAY: Final = 0.9
TRAINING_LABEL: Final = f"training loss, EMA {_DECAY}"
"""Word for the line. Single values of a training loss would hide the evaluations."""

_POINTS: Final = 1000
"""Limit of the number of points of the training loss, which is only a context here."""

_SHARED: Final = (Axis.STEP, Axis.CUMULATIVE, Axis.TIME)
"""Axes on which a step of the training and its evaluation have the same place."""

_BULK: Final = (0.005, 0.995)
"""Quantiles of the training loss since the first evaluation that the default range of the chart contains."""


def evaluation_curve(evaluations: History, loss: History, request: CurveRequest) -> Curve:
    """Return the curve of `evaluations`. Before its lines, it has the average of `loss`, if the axis is common to both.

    The default range contains the training loss since the first evaluation: before that, it can be much higher.
    """
    own = curve(evaluations, request)
    if request.axis not in _SHARED or request.newest is not None or not len(loss) or own.extent is None:
        return own
    training = curve(loss, replace(request, smoothing=Smoothing.EMA, decay=_DECAY, points=min(request.points, _POINTS)))
    if not training.lines or training.extent is None:
        return own
    (line,) = training.lines
    since = line.smoothed[(line.x >= own.extent[0]) & np.isfinite(line.smoothed)]
    return replace(
        own,
        lines=(_behind(line), *own.lines),
        restarts=training.restarts,  # the first evaluation of an attempt is later
        extent=(min(own.extent[0], training.extent[0]), max(own.extent[1], training.extent[1])),
        bulk=_joined(own.bulk, since),
    )


def _behind(line: Line) -> Line:
    average = line.smoothed
    nothing = np.full(len(average), np.nan)
    return replace(
        line, label=TRAINING_LABEL, role=Role.TRAINING, value=average, smoothed=nothing, low=average, high=average
    )


def _joined(bulk: tuple[float, float] | None, values: Floats) -> tuple[float, float] | None:
    if bulk is None or not len(values):
        return bulk
    low, high = np.quantile(values, _BULK)
    return min(bulk[0], float(low)), max(bulk[1], float(high))
