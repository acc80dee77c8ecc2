"""Histories read from raw rows equal the view `scalar_history`."""

from __future__ import annotations

import numpy as np
import pytest
from tests.view.training import HOSTILE, MAIN

from rankscope_view.data.history import main_labels, read_history
from rankscope_view.data.raw_rows import raw_histories

VIEW = """\
SELECT attempt, step, cumulative_step, value, lowest, highest, stands FROM scalar_history
WHERE run = $run AND name = $name AND labels IS NOT DISTINCT FROM $labels ORDER BY attempt, cumulative_step"""


@pytest.mark.parametrize("name", ["loss", "learning_rate", "eval_loss"])
@pytest.mark.parametrize("run", [MAIN, "only-nan", "no-times", HOSTILE])
def test_history_equals_the_view(connection, run, name):
    labels = main_labels(connection, run, [name]).get(name)
    expected = connection.query(VIEW, {"run": run, "name": name, "labels": labels})

    slow, fast = read_history(connection, run, name, labels), raw_histories(connection, run, [name])
    for found in (slow, fast.get(name, slow)):
        columns = {"step": found.step, "cumulative_step": found.cumulative, "attempt": found.attempt}
        columns |= {column: getattr(found, column) for column in ("value", "lowest", "highest", "stands")}
        for column, values in columns.items():
            stored = expected[column].to_numpy(zero_copy_only=False).astype(float)
            np.testing.assert_allclose(values.astype(float), stored)
    assert (name in fast) is bool(len(slow))


def test_steps_that_an_attempt_repeated_are_superseded(connection, course):
    found = read_history(connection, MAIN, "loss")
    again = found.select(~found.stands)

    assert set(course.step[course.attempt == 1]) >= set(again.step[again.attempt == 0].tolist())
    assert found.is_varied
    assert 0 == len(read_history(connection, "no such run", "loss"))
