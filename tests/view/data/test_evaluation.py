"""The chart of the evaluation loss has the training loss behind it."""

from __future__ import annotations

import numpy as np
import pytest
from tests.view.training import MAIN

from rankscope_view.data.curves import Axis, CurveRequest, Role, Smoothing, curve
from rankscope_view.data.evaluation import evaluation_curve
from rankscope_view.data.history import read_history


@pytest.mark.parametrize("axis", list(Axis))
def test_training_loss_is_behind_evaluations_on_common_axes(connection, axis):
    evaluations, loss, absent = (read_history(connection, MAIN, name) for name in ("eval_loss", "loss", "absent"))
    request = CurveRequest(axis=axis, smoothing=Smoothing.NONE)
    found, alone = (evaluation_curve(evaluations, one, request) for one in (loss, absent))

    expected = [] if axis in {Axis.ARRIVAL, Axis.ATTEMPT} else [Role.TRAINING]
    assert expected == [line.role for line in found.lines if line.role]
    assert {None} == {line.role for line in (found.lines[-1], *alone.lines)}
    if expected:
        behind = found.lines[0]
        since = behind.value[behind.x >= found.lines[-1].x[0]]
        assert (behind.x.min(), behind.x.max()) == found.extent
        assert curve(loss, CurveRequest(axis=axis)).restarts == found.restarts
        assert found.bulk[0] <= float(np.nanmedian(since)) <= found.bulk[1]
