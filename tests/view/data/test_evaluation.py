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
    evaluations, loss = (read_history(connection, MAIN, name) for name in ("eval_loss", "loss"))
    found = evaluation_curve(evaluations, loss, CurveRequest(axis=axis, smoothing=Smoothing.NONE))

    expected = [] if axis in {Axis.ARRIVAL, Axis.ATTEMPT} else [Role.TRAINING]
    assert expected == [line.role for line in found.lines if line.role]
    assert found.lines[-1].role is None
    if expected:
        behind = found.lines[0]
        assert (behind.x.min(), behind.x.max()) == found.extent
        assert curve(loss, CurveRequest(axis=axis)).restarts == found.restarts
        since = behind.value[behind.x >= found.lines[-1].x[0]]
        assert found.bulk is not None
        assert found.bulk[0] <= float(np.nanmedian(since)) <= found.bulk[1]


def test_evaluations_without_a_training_loss_are_alone(connection):
    evaluations = read_history(connection, MAIN, "eval_loss")
    found = evaluation_curve(evaluations, read_history(connection, MAIN, "absent"), CurveRequest())

    assert [None] == [line.role for line in found.lines]
