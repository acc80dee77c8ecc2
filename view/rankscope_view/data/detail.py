"""All numbers of the page of one run: its row, the histories of its charts, its events, and its restarts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rankscope_storage.connection import Connection
from rankscope_view.data.advice import Advice, early_stopping, logging_interval, perplexity, perplexity_history
from rankscope_view.data.events import EventLine, event_lines
from rankscope_view.data.runs import RunFacts, RunRow, run_facts, run_row
from rankscope_view.data.series import (
    EVAL_LOSS,
    GRAD_NORM,
    LEARNING_RATE,
    LOSS,
    SPEEDS,
    Floats,
    History,
    ScalarRows,
    main_series,
    read_rows,
    restarts,
)
from rankscope_view.data.tensor import total_gradient_norm

PERPLEXITY: Final = "perplexity"
STEP_SECONDS: Final = "step_seconds"
CHARTS: Final = (LOSS, PERPLEXITY, GRAD_NORM, LEARNING_RATE, EVAL_LOSS, *SPEEDS)
_TOKENS: Final = """\
SELECT 1 FROM scalars WHERE run = $run AND (name IN ('tokens_per_second', 'tokens_total')
  OR (name = 'tflops_per_gpu' AND NOT contains(coalesce(labels, ''), 'given'))) LIMIT 1"""
"""A live run with a row is that of a language model: it logs tokens, or its model took tokens in an earlier release."""

_LIVE: Final = "SELECT attempt FROM runs WHERE run = $run AND ended_at IS NULL AND source_kind = 'live'"

RECENT_ROWS: Final = 100
SHORT_ROWS: Final = 5

_FEWEST_ROWS: Final = 10
_COMPARED_ROWS: Final = 20_000
_LEAST_ERRORS: Final = 4.5
"""Least difference of the ranks before and after a change, in standard errors: the largest of 600 random rows is above
4 in 0.2 % of all cases."""
"""Number of the newest rows that the header of a run compares with those before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Begin of a later attempt: the last step before it, and the step to which it went back."""

    attempt: int
    last_step: int
    first_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetail:
    """The numbers of the page of one run. `histories` has the scalars of CHARTS that the run logged, by name."""

    row: RunRow
    facts: RunFacts
    histories: Mapping[str, History]
    lines: Sequence[EventLine]
    restarts: tuple[Restart, ...]
    steps_again: int
    advice: tuple[Advice, ...]
    perplexity: float | None
    loss_change: (
        tuple[float, float, int] | None
    )  # medians of the first and last SHORT_ROWS of the newest rows; their number

    def history(self, name: str) -> History:
        """Return the history of the scalar `name`, without rows if the run has none."""
        return self.histories.get(name) or nothing(name)


def nothing(name: str) -> History:
    """Return the history of a scalar without rows."""
    whole, real = np.array([], np.int64), np.array([], np.float64)
    arrays = {"time": real, "value": real, "lowest": real, "highest": real}
    return History(name=name, attempt=whole, step=whole, cumulative=whole, stands=np.array([], np.bool_), **arrays)


def read_chart(connection: Connection, run: str, name: str, rank: int | None = None) -> History:
    """Return the history of the main series of a scalar, or of the perplexity, which the loss determines.

    With `rank`, it has only the rows of this rank.
    """
    return read_charts(connection, run, [name], rank)[name]


def read_charts(connection: Connection, run: str, names: Sequence[str], rank: int | None = None) -> dict[str, History]:
    """Return the histories of several scalars or of the perplexity, which are read together."""
    sources = {name: LOSS if name == PERPLEXITY else name for name in names}
    found = main_histories(connection, run, sorted(set(sources.values())), rank)
    read = {name: found.get(source) or nothing(name) for name, source in sources.items()}
    return {name: perplexity_history(one) if name == PERPLEXITY else one for name, one in read.items()}


def main_histories(
    connection: Connection, run: str, names: Sequence[str], rank: int | None = None, rows: ScalarRows | None = None
) -> dict[str, History]:
    """Return the main series of those scalars in `names` that `run` has, of all ranks or one.

    `rows` has their rows, if they were read before. A gradient norm that is not logged is that of all gradients.
    """
    found = main_series(connection, run, names, rank, rows)
    if any(one.attempt.any() for one in found.values()):
        for live in connection.query(_LIVE, {"run": run})["attempt"].to_pylist():
            found = {name: _standing(history, live) for name, history in found.items()}
    if GRAD_NORM in names and GRAD_NORM not in found and rank is None:
        total = total_gradient_norm(connection, run)
        found |= {} if total is None else {GRAD_NORM: total}
    return found


def read_detail(connection: Connection, run: str, *, most_step_times: int | None = None) -> RunDetail | None:
    """Return the numbers of the page of `run`, or None if the store does not contain it.

    The goodput is left out if the run logged more than `most_step_times` step times.
    """
    with connection.pinned():
        names = [name for name in CHARTS if name != PERPLEXITY]
        rows = read_rows(connection, [run], names)
        row = run_row(connection, run, rows)
        if row is None:
            return None
        histories = main_histories(connection, run, names, rows=rows)
        lines = event_lines(connection, run)
        has_tokens = row.source_kind != "live" or bool(connection.query(_TOKENS, {"run": run}).num_rows)
        facts = run_facts(connection, run, with_goodput=_needs_goodput(rows, run, most_step_times))
    loss = histories.get(LOSS) or nothing(LOSS)
    if len(loss) and has_tokens:
        histories[PERPLEXITY] = perplexity_history(loss)
    newest = [one.value[-1] for one in (loss, histories.get(GRAD_NORM, loss)) if len(one)]
    is_ruined = row.is_ruined or not np.isfinite(newest).all()
    early = None if is_ruined else early_stopping(histories.get(EVAL_LOSS) or nothing(EVAL_LOSS), loss)
    advice = [early, logging_interval(loss)]
    return RunDetail(
        row=row,
        facts=facts,
        histories=histories,
        lines=lines,
        restarts=_restarts(loss),
        steps_again=int((~loss.stands).sum()),
        advice=tuple(one for one in advice if one is not None),
        perplexity=None
        if row.loss is None or math.isnan(row.loss) or not has_tokens
        else float(perplexity(np.array([row.loss]))[0]),
        loss_change=_change(loss),
    )


def _standing(history: History, attempt: int) -> History:
    """Return `history`, in which younger attempts, which have ended, supersede no step of the live `attempt`."""
    return replace(history, stands=(history.attempt == attempt) | (history.stands & (history.attempt < attempt)))


def _needs_goodput(rows: ScalarRows, run: str, most: int | None) -> bool | None:
    """Return whether the goodput must be calculated; None if the run has too many step times, and False without any."""
    count = sum(len(part.step) for parts in rows.parts.get((run, STEP_SECONDS), {}).values() for part in parts)
    return None if most is not None and count > most else count > 0


def _restarts(loss: History) -> tuple[Restart, ...]:
    """Return the restarts that the loss shows."""
    return tuple(
        Restart(attempt=int(loss.attempt[at]), last_step=int(loss.step[at - 1]), first_step=int(loss.step[at]))
        for at in restarts(loss.attempt).tolist()
    )


def _change(loss: History) -> tuple[float, float, int] | None:
    values = (loss.value if loss.stands.all() else loss.value[loss.stands])[-RECENT_ROWS:]
    if not np.isfinite(values).all() or not lasting_change(values):
        return None
    return float(np.median(values[:SHORT_ROWS])), float(np.median(values[-SHORT_ROWS:])), len(values)


def lasting_change(values: Floats) -> int:
    """Return the place at which the finite `values` change for good; 0 if each difference may be due to chance.

    The ranks before and after a place are compared in standard errors of their difference, as in the test of Wilcoxon.
    Of all places with at least _FEWEST_ROWS rows on each side, the one with the largest difference is the result.
    """
    count = len(values)
    _, place, equal = np.unique(values, return_inverse=True, return_counts=True)
    if count < 2 * _FEWEST_ROWS or len(equal) < 2:
        return 0
    ranks = (np.cumsum(equal) - (equal - 1) / 2)[place]
    at = np.arange(_FEWEST_ROWS, count - _FEWEST_ROWS + 1)
    errors = np.abs(np.cumsum(ranks - ranks.mean())[at - 1]) / (ranks.std() * np.sqrt(at * (count - at) / count))
    return int(at[np.argmax(errors)]) if errors.max() >= _LEAST_ERRORS else 0


def speed_change(history: History) -> tuple[float, int] | None:
    """Return the relative change of the newest speed against the one before, and the step at which it began.

    Both are medians of the rows after and before the newest lasting change. The change is at least a tenth; otherwise
    the result is None. Of a long history, rows at equal distances are compared.
    """
    known = np.flatnonzero(np.isfinite(history.value))[:: len(history.value) // _COMPARED_ROWS + 1]
    values, begin = history.value[known], 0
    while found := lasting_change(values[begin:]):
        begin += found
    usual = float(np.median(values[:begin])) if begin else 0.0
    change = float(np.median(values[begin:])) / usual - 1 if usual else 0.0
    return (change, int(history.step[known[begin]])) if 0.1 <= abs(change) < math.inf else None
