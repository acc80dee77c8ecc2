"""Newest values of runs, their sparklines, and their time left, for the list of runs and the header of one run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from rankscope_storage.base.escaping import sql_string
from rankscope_storage.connection import Connection
from rankscope_storage.sql.scalar_history import is_main_source
from rankscope_view.data.history import LEARNING_RATE, LOSS, SPEEDS, Floats, Integers, is_constant
from rankscope_view.data.raw_rows import RawRows, SeriesRows, by_step, read_rows

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
_NAMES: Final = ", ".join(map(sql_string, _SHOWN))

# The mean over ranks at a step, of the first labels of a name: as in `read_history` and `summaries`.
_LOGGED: Final = f"""\
SELECT run, name, labels, coalesce(attempt, 0) AS attempt, rank, position, ts, value FROM scalars
WHERE run IN (SELECT unnest($runs)) AND value IS NOT NULL AND position IS NOT NULL AND {is_main_source()}"""

# Scans with few groups take a fraction of the time of one group per step.
_LATEST: Final = f"""\
WITH logged AS ({_LOGGED} AND name IN ({_NAMES})),
first AS (
  SELECT run, name, min(chosen) AS chosen, arg_min(attempt, chosen) AS attempt
  FROM (SELECT run, name, coalesce(labels, '') AS chosen, max(attempt) AS attempt FROM logged GROUP BY ALL) GROUP BY ALL
),
newest AS (
  SELECT run, name, chosen, attempt, max(position) AS position, count(DISTINCT rank) AS known
  FROM logged JOIN first USING (run, name, attempt) WHERE coalesce(labels, '') = chosen GROUP BY ALL
),
by_step AS (
  SELECT run, name, logged.position, known, any_value(attempt) AS attempt, max(ts) AS newest_ts,
    avg(value) AS value, count(*) AS rows, count(DISTINCT rank) AS ranks
  FROM logged JOIN newest USING (run, name, attempt)
  WHERE coalesce(labels, '') = chosen
    AND logged.position > newest.position - if(name IN ('{"', '".join(SPEEDS)}'), {SPEED_STEPS}, 1)
  GROUP BY ALL
),
complete AS (
  SELECT *, rows = max(rows) OVER (PARTITION BY run, name) AS is_complete FROM by_step
)
SELECT run, name, any_value(attempt) AS attempt, max(position) AS position,
  epoch(arg_max(newest_ts, position)) AS logged_at, median(value) FILTER (is_complete) AS value,
  median(value) FILTER (is_complete) * greatest(any_value(known), 1) AS total,
  arg_max(ranks, position) AS ranks, any_value(known) - arg_max(ranks, position) AS missing
FROM complete GROUP BY run, name"""

# A third of the points each: the lowest, the highest and the last value of a part of the curve.
_SPARKLINES: Final = f"""\
WITH logged AS ({_LOGGED} AND name = '{LOSS}'),
first AS (
  SELECT run, min(coalesce(labels, '')) AS chosen FROM logged GROUP BY ALL
),
main AS (
  SELECT run, attempt, position, avg(value) AS value
  FROM logged JOIN first USING (run) WHERE coalesce(labels, '') = chosen GROUP BY ALL
),
placed AS (
  SELECT *, row_number() OVER by_arrival - 1 AS place, count(*) OVER (PARTITION BY run) AS places
  FROM main WINDOW by_arrival AS (PARTITION BY run ORDER BY attempt, position)
),
part AS (
  SELECT run, place * {SPARKLINE_POINTS // 3} // places AS part,
    arg_min(place, value) FILTER (isfinite(value)) AS low, arg_max(place, value) FILTER (isfinite(value)) AS high,
    max(place) AS last, max(place) FILTER (NOT isfinite(value)) AS bad
  FROM placed GROUP BY ALL
),
kept AS (
  SELECT DISTINCT run, unnest([low, high, coalesce(bad, last)]) AS place FROM part
)
SELECT run, list({{place: place, value: value}} ORDER BY place) AS points, any_value(places) AS places
FROM kept JOIN placed USING (run, place) GROUP BY run"""

_JUMPED: Final = "SELECT DISTINCT run FROM clock_jumps WHERE run IN (SELECT unnest($runs))"
_ETA: Final = "SELECT run, eta_seconds, seconds_per_step, step FROM run_eta WHERE run IN (SELECT unnest($runs))"


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
    rows: RawRows | None = None,
) -> Newest:
    """Return the newest rows of `runs`, and the time left of the runs in `live`.

    `rows` has the rows of the shown scalars, if they were read before.
    """
    found = Newest()
    rows = rows or (read_rows(connection, runs, set(_SHOWN)) if runs else RawRows())
    if asked := sorted(live.keys() & set(runs)):
        # The rows have the times of the clock, also if it was set meanwhile.
        rows.for_sql.update(row["run"] for row in connection.query(_JUMPED, {"runs": asked}).to_pylist())
    for run in runs:
        if run not in rows.for_sql:
            _add(found, rows, run, live, has_curves=has_curves)
    _add_by_sql(connection, found, sorted(rows.for_sql), live, has_curves=has_curves)
    return found


def _add(found: Newest, rows: RawRows, run: str, live: Live, *, has_curves: bool) -> None:
    series = {name: one for name in _SHOWN if (one := rows.main(run, name)) is not None}
    last = live.get(run, {}).get("attempt")
    for name, one in series.items():
        own = one.attempt <= (math.inf if last is None else last)  # a younger one has ended before it
        series[name] = one if own.all() or not own.any() else one.select(own)
        found.values[run, name] = _newest(series[name], SPEED_STEPS if name in SPEEDS else 1)
    if has_curves and LOSS in series:
        columns = by_step(series[LOSS])
        if columns is None:
            rows.for_sql.add(run)  # a rank logged a step twice
            return
        found.sparklines[run] = _sparkline(columns["value"])
    if run in live:
        found.etas[run] = _seconds_left(list(series.values()), live[run]["planned_steps"])


def _newest(rows: SeriesRows, steps: int) -> dict[str, Any]:
    attempt = rows.attempt.max()
    is_older = not is_constant(rows.attempt) and attempt != rows.attempt.min()
    step = int((rows.step[rows.attempt == attempt] if is_older else rows.step).max())
    recent = np.flatnonzero(rows.step > step - steps)
    if is_older:
        recent = recent[rows.attempt[recent] == attempt]
    own = recent[rows.step[recent] == step]
    known, ranks = (_ranks(rows.rank[chosen]) for chosen in (rows.attempt == attempt if is_older else slice(None), own))
    at, value = float(np.fmax.reduce(rows.time[own])), _usual(rows.step[recent], rows.value[recent])
    return {
        "value": value,
        "total": value * max(known, 1),
        "position": step,
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
    step, time = (np.concatenate([getattr(one, name) for one in recent]) for name in ("step", "time"))
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
    own = [one for one in own if len(one.step) and one.attempt[0] == attempt]
    newest = max(int(one.step.max()) for one in own)
    return newest, [one.select((one.step > newest - _PACE_STEPS) & np.isfinite(one.time)) for one in own]


def _add_by_sql(connection: Connection, found: Newest, runs: Collection[str], live: Live, *, has_curves: bool) -> None:
    if not runs:
        return
    for row in connection.query(_LATEST, {"runs": list(runs)}).to_pylist():
        found.values[row["run"], row["name"]] = row
    for line in connection.query(_SPARKLINES, {"runs": list(runs)}).to_pylist() if has_curves else ():
        points = tuple((point["place"], point["value"]) for point in line["points"])
        found.sparklines[line["run"]] = Sparkline(points=points, places=line["places"])
    active = [run for run in runs if run in live]
    for pace in connection.query(_ETA, {"runs": active}).to_pylist() if active else ():
        found.etas[pace["run"]] = pace["eta_seconds"]
