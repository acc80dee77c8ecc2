"""Numbers and sentences derived from curves: perplexity, advice on early stopping and on the interval of logging."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rankscope_view.data.series import Floats, History, Integers

LARGEST_EXPONENT: Final = math.log(np.finfo(np.float64).max)
"""Loss above which its exponential is larger than any double: 709.78. The perplexity is infinite there."""

PATIENCE: Final = 3
"""Evaluations without an improvement after which the advice mentions the best checkpoint."""

_MOST_ROWS: Final = 100_000
_FEWEST_ROWS: Final = 50
_RECENT: Final = 5


def perplexity(loss: Floats) -> Floats:
    """Return exp(loss): infinite where the loss exceeds 709.78, and NaN where the loss is NaN."""
    with np.errstate(over="ignore"):
        found: Floats = np.exp(np.asarray(loss, np.float64))
    return found


def perplexity_history(loss: History) -> History:
    """Return the history of the perplexity, from that of the loss."""
    value = perplexity(loss.value)
    lowest, highest = (value if one is loss.value else perplexity(one) for one in (loss.lowest, loss.highest))
    return replace(loss, name="perplexity", value=value, lowest=lowest, highest=highest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A sentence about an observation, and whether it recommends an action."""

    text: str
    is_action: bool


def early_stopping(evaluation: History, training: History) -> Advice:
    """Return advice on early stopping, from the evaluation loss and the training loss without superseded steps."""
    evaluation = evaluation.select(evaluation.stands)
    if len(evaluation) and not np.isfinite(evaluation.value[-1]):
        text = "The newest evaluation loss is not finite: early stopping cannot be judged."
        return Advice(text=text, is_action=False)
    evaluation = evaluation.select(np.isfinite(evaluation.value))
    if len(evaluation) < 2:
        count = "no evaluation loss" if not len(evaluation) else "one evaluation loss"
        return Advice(text=f"There is {count} so far: early stopping cannot be judged.", is_action=False)
    best = int(np.argmin(evaluation.value))
    since = len(evaluation) - 1 - best
    words = f"best {evaluation.value[best]:.4g} at step {evaluation.step[best]:,}"
    if since == 0:
        improved = int((np.diff(np.minimum.accumulate(evaluation.value)) < 0).sum())
        last = "the last evaluation" if best == 1 else f"{improved} of the last {best} evaluations"
        text = f"Evaluation loss improved in {last}; {words}."
        return Advice(text=f"{text} No reason to stop.", is_action=False)
    text = f"No improvement in {since} evaluation{'' if since == 1 else 's'}; {words}."
    if since < PATIENCE:
        return Advice(text=f"{text} Wait: {PATIENCE} are needed for advice.", is_action=False)
    overfits = _is_falling(training, int(evaluation.step[best]))
    reason = "The training loss still falls, which is overfitting. " if overfits else ""
    return Advice(text=f"{text} {reason}Consider stopping, and use the checkpoint of that step.", is_action=True)


def _is_falling(training: History, since: int) -> bool:
    """Return whether the mean training loss after step `since` is lower than that of as many rows before it."""
    rows = training.select(training.stands & np.isfinite(training.value))
    after = rows.value[rows.step > since]
    before = rows.value[rows.step <= since][-len(after) :] if len(after) else after
    return bool(len(after) and len(before) and after.mean() < before.mean())


def _adjacent(steps: Integers) -> int:
    """Return the number of steps that follow directly upon the one before; in blocks, without an array of all."""
    blocks = (steps[at : at + _MOST_ROWS + 1] for at in range(0, len(steps), _MOST_ROWS))
    return sum(int(np.count_nonzero(np.diff(block) <= 1)) for block in blocks)


def logging_interval(loss: History) -> Advice | None:
    """Return advice on the interval of logging if a run has very many or very few rows; otherwise None."""
    steps = loss.step if loss.stands.all() else loss.step[loss.stands]
    if len(loss) > _MOST_ROWS and 2 * _adjacent(steps) >= len(steps) - 1:
        text = f"{len(loss):,} rows are logged, one per step: a higher logging interval keeps the curve and saves time."
        return Advice(text=text, is_action=False)
    if not _RECENT < len(loss) < _FEWEST_ROWS:
        return None
    interval = float(np.median(np.diff(steps))) if len(steps) > _RECENT else 0.0
    if interval >= 10:
        text = f"One row per {interval:,.0f} steps: a lower logging interval shows more detail."
        return Advice(text=text, is_action=False)
    return None
