"""Perplexity with its overflow guard, and advice on early stopping and logging."""

from __future__ import annotations

import numpy as np
import pytest
from tests.view.data.test_curves import history

from rankscope_view.data.advice import early_stopping, logging_interval, perplexity


def test_perplexity_is_infinite_above_the_largest_exponent():
    found = perplexity(np.array([0.0, 709.0, 710.0, np.nan]))

    assert [1.0, True, True, True] == [found[0], np.isfinite(found[1]), np.isinf(found[2]), np.isnan(found[3])]


@pytest.mark.parametrize(
    ("losses", "words", "is_action"),
    [
        ([], "no evaluation loss", False),
        ([2.0], "one evaluation loss", False),
        ([3.0, 2.0, 1.0], "improved in 2 of the last 2 evaluations; best 1 at step 2. No reason to stop", False),
        ([3.0, 2.0], "Evaluation loss improved in the last evaluation; best 2 at step 1.", False),
        ([3.0, 1.0, 2.0], "Wait", False),
        ([3.0, 1.0, 2.0, 2.1, 2.2], "Consider stopping", True),
    ],
)
def test_advice_follows_the_best_evaluation(losses, words, is_action):
    found = early_stopping(history(losses), history(np.linspace(5, 1, 20)))

    assert words in found.text
    assert is_action is found.is_action


def test_advice_names_overfitting_if_the_training_loss_still_falls():
    evaluation = history([3.0, 1.0, 2.0, 2.1, 2.2], step=[0, 5, 10, 15, 20])

    assert "overfitting" in early_stopping(evaluation, history(np.linspace(5, 1, 20))).text
    assert "overfitting" not in early_stopping(evaluation, history(np.linspace(1, 5, 20))).text


def test_long_run_that_logs_each_step_is_advised_to_log_less():
    found = logging_interval(history(np.ones(100_001)))

    assert found is not None
    assert "a higher logging interval" in found.text
    assert logging_interval(history(np.ones(200))) is None
