"""Newest values of runs, their sparklines, and their time left, for the list of runs and the header of one run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from rankscope_storage.connection import Connection
from rankscope_view.data.series import (
    LEARNING_RATE,
    LOSS,
    SPEEDS,
    Floats,
    Integers,
    ScalarRows,
    SeriesRows,
    by_step,
    is_constant,
    read_rows,
)

SPARKLINE_POINTS: Final = 60
_PACE_STEPS: Final = 100
_PACE_SECONDS: Final = 30.0
_LEAST_STEPS: Final = 10
_PARTS: Final = 5
"""The time left follows from those of the newest 100 steps that are among the last 10 logged ones or at most 30 s old.

The pace is the median over five parts of them, as in the view `run_eta`: one pause does not change it.
"""

SPEED_STEPS: Final = 20
"""Number of newest steps over which a speed is the median, because the last step of an ended run has another length."""

_SHOWN: Final = (LOSS, LEARNING_RATE, *SPEEDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparkline:
    """At most 60 points of the loss in the order of arrival, with their numbers among `places` rows; NaN is kept."""

    points: tuple[tuple[int, float], ...] = ()
    places: int = 0


NO_CURVE: Final = Sparkline()


Live = Mapping[str, Mapping[str, Any]]
"""Attempt and planned steps of live runs, by run."""


@dataclass(slots=True)
class Newest:
    """Newest rows by run and name, and sparklines and seconds that are left by run."""

    values: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    sparklines: dict[str, Sparkline] = field(default_factory=dict)
    etas: dict[str, float | None] = field(default_factory=dict)


def read_newest(
    connection: Connection,
    runs: Sequence[str],
    live: Live,
    *,
    has_curves: bool,
    rows: ScalarRows | None = None,
) -> Newest:
    """Return the newest rows of `runs`, and the time left of the runs in `live`.

    `rows` has the rows of the shown scalars, if they were read before.
    """
    found = Newest()
    rows = rows or read_rows(connection, runs, set(_SHOWN))
    for run in runs:
        _add(found, rows, run, live, has_curves=has_curves)
    return found


def _add(found: Newest, rows: ScalarRows, run: str, live: Live, *, has_curves: bool) -> None:
    series = {name: one for name in _SHOWN if (one := rows.main(run, name)) is not None}
    last = live.get(run, {}).get("attempt")
    for name, one in series.items():
        own = one.attempt <= (math.inf if last is None else last)  # a younger one has ended before it
        series[name] = one if own.all() or not own.any() else one.select(own)
        found.values[run, name] = _newest(series[name], SPEED_STEPS if name in SPEEDS else 1)
    if has_curves and LOSS in series:
        found.sparklines[run] = _sparkline(by_step(series[LOSS])[0]["value"])
    if run in live:
        found.etas[run] = _seconds_left(list(series.values()), live[run]["planned_steps"])


def _newest(rows: SeriesRows, steps: int) -> dict[str, Any]:
    attempt = rows.attempt.max()
    is_older = not is_constant(rows.attempt) and attempt != rows.attempt.min()
    last = int((rows.position[rows.attempt == attempt] if is_older else rows.position).max())
    recent = np.flatnonzero(rows.position > last - steps)
    if is_older:
        recent = recent[rows.attempt[recent] == attempt]
    own = recent[rows.position[recent] == last]
    known, ranks = (_ranks(rows.rank[chosen]) for chosen in (rows.attempt == attempt if is_older else slice(None), own))
    at, value = float(np.fmax.reduce(rows.time[own])), _usual(rows.position[recent], rows.value[recent])
    return {
        "value": value,
        "total": value * max(known, 1),
        "position": last,
        "attempt": int(attempt),
        "logged_at": None if math.isnan(at) else at,
        "ranks": ranks,
        "missing": known - ranks,
    }


def _usual(step: Integers, values: Floats) -> float:
    """Return the median over steps of the mean over ranks, of the steps that most ranks completed. NaN is highest."""
    _, place, count = np.unique(step, return_inverse=True, return_counts=True)
    means = np.sort((np.bincount(place, weights=values) / count)[count == count.max()])
    return float(means[(len(means) - 1) // 2] / 2 + means[len(means) // 2] / 2)


def _ranks(rank: Integers) -> int:
    """Return the number of different ranks, of which -1 is none."""
    return int(rank[0] >= 0) if is_constant(rank) else int(np.count_nonzero(np.bincount(rank + 1)[1:]))


def _sparkline(values: Floats) -> Sparkline:
    """Return the lowest, the highest and the last value of each of 20 parts; instead of the last, one that is NaN."""
    places = len(values)
    parts = SPARKLINE_POINTS // 3
    begins = sorted({-(-part * places // parts) for part in range(parts)} - {places})
    kept: set[int] = set()
    is_finite = np.isfinite(values)
    are_finite = bool(is_finite.all())
    for first, last in itertools.pairwise([*begins, places]):
        part, finite = values[first:last], is_finite[first:last]
        if are_finite or finite.all():
            kept |= {first + int(part.argmin()), first + int(part.argmax()), last - 1}
            continue
        if finite.any():
            own = np.flatnonzero(finite)
            kept |= {first + int(own[part[own].argmin()]), first + int(own[part[own].argmax()])}
        kept.add(first + int(np.flatnonzero(~finite)[-1]))
    drawn = sorted(kept)
    return Sparkline(points=tuple(zip(drawn, values[drawn].tolist(), strict=True)), places=places)


def _seconds_left(series: Sequence[SeriesRows], planned: int | None) -> float | None:
    """Return the time left by the clock of the newest steps, as the view `run_eta` has it; None if it is unknown."""
    if not series or planned is None:
        return None
    attempt = max(int(one.attempt.max()) for one in series)
    newest, recent = _newest_steps(series, attempt)
    if newest >= planned:
        return 0.0
    step, time = (np.concatenate([getattr(one, name) for one in recent]) for name in ("position", "time"))
    order = np.argsort(step, kind="stable")
    step, time = step[order], time[order]
    begins = np.flatnonzero(np.diff(step, prepend=-1))
    if len(begins) < 2:
        return None
    last = np.maximum.reduceat(time, begins)
    is_recent = last[1:] > last.max() - _PACE_SECONDS
    is_recent[-_LEAST_STEPS:] = True
    parts = np.array_split(np.stack((np.diff(last), np.diff(step[begins])))[:, is_recent], _PARTS, axis=1)
    paces = [seconds / steps for seconds, steps in (part.sum(axis=1) for part in parts if part.size)]
    return (planned - newest) * float(np.median(paces))


def _newest_steps(series: Sequence[SeriesRows], attempt: int) -> tuple[int, list[SeriesRows]]:
    """Return the newest step of an attempt, and the rows with a time of the steps before it that determine the pace."""
    own = [one if is_constant(one.attempt) else one.select(one.attempt == attempt) for one in series]
    own = [one for one in own if len(one.position) and one.attempt[0] == attempt]
    newest = max(int(one.position.max()) for one in own)
    return newest, [one.select((one.position > newest - _PACE_STEPS) & np.isfinite(one.time)) for one in own]
