"""Ranks of a run: times of a step by phase, slow and silent ranks, memory and GPU.

A slow rank makes the others wait in collectives. Its own time is all other time: input, computation and pauses. Where
waits cannot be separated from computation, for example with FSDP, only input and pauses are own time.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rankscope_contract.model.phases import COMPUTING, STEP_PHASE_SECONDS, Phase
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.connection import Connection
from rankscope_view.data.grid import ABSENT, LEVELS, Grid, empty_grid, plain_grid, row_medians
from rankscope_view.data.series import Floats

RECENT_STEPS: Final = 20
STRIP_STEPS: Final = 200
SILENT_STEPS: Final = 3
"""A rank is silent if its last step is at least this many steps behind the newest step of any rank."""

STEP_SECONDS: Final = "step_seconds"
_STRIP_SCALE: Final = (0.95, 1.35)
_LATEST_NAMES: Final = (
    "device_memory_allocated_bytes",
    "device_memory_reserved_bytes",
    "gpu_memory_total_bytes",
    "gpu_utilization",
    "gpu_clock_hertz",
    "gpu_temperature_celsius",
    "resident_memory_bytes",
)
_NAMES: Final = ", ".join(map(sql_string, (STEP_SECONDS, STEP_PHASE_SECONDS, *_LATEST_NAMES)))

_NEWEST: Final = """\
SELECT rank, max(step) AS step, epoch(max(ts)) AS seen_at FROM scalars
WHERE run = $run AND rank IS NOT NULL AND coalesce(attempt, 0) = $attempt GROUP BY rank ORDER BY rank"""
_ATTEMPT: Final = "SELECT max(coalesce(attempt, 0)) AS attempt FROM {scalars} WHERE run = $run AND rank IS NOT NULL"
_MEANS: Final = f"""\
SELECT rank, name, labels->>'$.phase' AS phase, labels->>'$.clock' AS clock,
  avg(value) AS mean, count(*) AS rows, arg_max(value, step) AS latest
FROM {{scalars}} WHERE run = $run AND coalesce(attempt, 0) = $attempt AND name IN ({_NAMES})
  AND step > $last - {RECENT_STEPS} AND isfinite(value) GROUP BY ALL"""
_PHASES: Final = """\
SELECT rank, step, coalesce(labels->>'$.phase', '') AS phase, avg(value) AS value FROM {scalars}
WHERE run = $run AND coalesce(attempt, 0) = $attempt AND name = $name AND step > $last - $steps
  AND rank IS NOT NULL AND isfinite(value) GROUP BY ALL"""
_HOSTS: Final = """\
SELECT rank, arg_max(details->>'$.host', ts) AS host FROM events
WHERE run = $run AND type = 'launch' AND json_valid(details) AND rank IS NOT NULL GROUP BY rank"""
_WORLD: Final = "SELECT world_size FROM runs WHERE run = $run"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank: means over its newest steps, and its newest measurements of memory and GPU. None is unknown."""

    rank: int
    host: str | None = None
    last_step: int | None = None  # None: the rank has no row
    seen_at: float | None = None
    step_seconds: float | None = None
    compute_seconds: float | None = None  # input, computation and pauses: a step without the wait for others
    phases: Mapping[str, float] = field(default_factory=dict)
    latest: Mapping[str, float] = field(default_factory=dict)
    slow: SlowRank | None = None
    is_silent: bool = False
    against_median: float | None = None  # 0.31: 31 % longer than the median of the others

    @property
    def wait_seconds(self) -> float | None:
        """Return the time of a step in which the rank waits for other ranks."""
        return self.phases.get("collective")


class RankOrder(enum.StrEnum):
    """Order of the ranks on their page."""

    WORST = "worst"  # slow ranks, the slowest first, then silent ones, then the others
    RANK = "rank"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """All ranks of the newest attempt of a run, and medians over the ranks."""

    attempt: int
    rows: tuple[RankRow, ...]
    last_step: int | None
    median_step: float | None

    def ordered(self, order: RankOrder) -> RankTable:
        """Return the table with its rows in another order."""
        keys: dict[RankOrder, Callable[[RankRow], Any]] = {
            RankOrder.RANK: lambda row: row.rank,
            RankOrder.WORST: lambda row: (
                (0, -(row.against_median or 0.0)) if row.slow else (1 if row.is_silent else 2, 0.0),
                row.rank,
            ),
            RankOrder.HOST: lambda row: (row.host or "", row.rank),
        }
        return replace(self, rows=tuple(sorted(self.rows, key=keys[order])))


def rank_table(connection: Connection, run: str) -> RankTable:
    """Return the ranks of the newest attempt of `run`. A rank without a row in this attempt is silent."""
    with connection.pinned():
        source = {"scalars": connection.relation("scalars", run=run)}
        attempt = connection.query(_ATTEMPT.format(**source), {"run": run})["attempt"].to_pylist()[0] or 0
        chosen = {"run": run, "attempt": attempt}
        newest = {row["rank"]: row for row in connection.query(_NEWEST, chosen).to_pylist()}
        steps = [row["step"] for row in newest.values() if row["step"] is not None]
        last = max(steps, default=None)
        means = [] if last is None else connection.query(_MEANS.format(**source), chosen | {"last": last}).to_pylist()
        hosts, world = hosts_and_world(connection, run)
        phases = read_phases(connection, run, attempt, last or 0)
    ranks = sorted({*newest, *range(world), *hosts})
    rows = [
        _row(rank, newest.get(rank), hosts.get(rank), [one for one in means if one["rank"] == rank]) for rank in ranks
    ]
    return _judged(attempt, rows, last, phases)


def hosts_and_world(connection: Connection, run: str) -> tuple[dict[int, str], int]:
    """Return the host of each rank that reported it, and the number of ranks; 0 if it is unknown."""
    hosts = {row["rank"]: row["host"] for row in connection.query(_HOSTS, {"run": run}).to_pylist()}
    world = next(iter(connection.query(_WORLD, {"run": run})["world_size"].to_pylist()), None)
    return hosts, world or 0


def _row(rank: int, newest: Mapping[str, Any] | None, host: str | None, means: list[dict[str, Any]]) -> RankRow:
    timed = [one for one in means if one["name"] == STEP_PHASE_SECONDS and one["phase"]]
    steps = max((one["rows"] for one in timed), default=0)  # a step may lack a phase
    phases = {one["phase"]: one["mean"] * one["rows"] / steps for one in timed}
    plain = {one["name"]: one for one in means if one["name"] != STEP_PHASE_SECONDS and one["clock"] in (None, "sm")}
    return RankRow(
        rank=rank,
        host=host,
        last_step=None if newest is None else newest["step"],
        seen_at=None if newest is None else newest["seen_at"],
        step_seconds=plain.get(STEP_SECONDS, {}).get("mean"),
        phases=phases,
        latest={name: plain[name]["latest"] for name in _LATEST_NAMES if name in plain},
    )


def _judged(attempt: int, rows: list[RankRow], last: int | None, phases: PhaseSteps) -> RankTable:
    silent = {
        row.rank for row in rows if last is not None and (row.last_step is None or last - row.last_step >= SILENT_STEPS)
    }
    times = [row.step_seconds for row in rows if row.step_seconds is not None and row.rank not in silent]
    middle = float(np.median(times)) if times else None
    heard = [at for at, rank in enumerate(phases.ranks) if rank not in silent]
    found = find_slow_ranks(phases.seconds[heard], phases.phases, phases.steps)
    slow = {phases.ranks[heard[one.row]]: one for one in found}
    recent = own_seconds(phases.seconds, phases.phases)[:, np.array(phases.steps) > (last or 0) - RECENT_STEPS]
    counts = np.isfinite(recent).sum(axis=1)
    own = np.where(counts, np.nansum(recent, axis=1) / np.maximum(counts, 1), np.nan)
    usual = dict(zip(phases.ranks, zip(own.tolist(), of_others(own).tolist(), strict=True), strict=True))
    judged = []
    for row in rows:
        mine, others = usual.get(row.rank, (np.nan, np.nan))
        judged.append(
            replace(
                row,
                compute_seconds=mine if np.isfinite(mine) else None,
                against_median=mine / others - 1 if len(usual) > 1 and mine >= 0 and others > 0 else None,
                slow=slow.get(row.rank),
                is_silent=row.rank in silent,
            )
        )
    return RankTable(attempt=attempt, rows=tuple(judged), last_step=last, median_step=middle)


@dataclass(frozen=True, slots=True)
class PhaseSteps:
    """Seconds [ranks, steps, phases] of the newest steps; a step that a rank does not have is NaN."""

    ranks: list[int]
    steps: list[int]
    phases: list[str]
    seconds: Floats


def read_phases(
    connection: Connection, run: str, attempt: int, last: int, name: str = STEP_PHASE_SECONDS
) -> PhaseSteps:
    """Return the phases of the newest steps of all ranks of an attempt; of another scalar `name`, one for all time."""
    source = connection.relation("scalars", run=run, steps=(max(0, last - STRIP_STEPS), last))
    parameters = {"run": run, "attempt": attempt, "name": name, "last": last, "steps": STRIP_STEPS}
    rows = connection.query(_PHASES.format(scalars=source), parameters)
    axes = [np.unique(rows[name].to_numpy(), return_inverse=True) for name in ("rank", "step", "phase")]
    (ranks, rank), (steps, step), (phases, phase) = axes
    seconds = np.full((len(ranks), len(steps), len(phases)), np.nan)
    seconds[rank, step] = 0.0
    seconds[rank, step, phase] = rows["value"].to_numpy()
    return PhaseSteps(ranks.tolist(), steps.tolist(), phases.tolist(), seconds)


def rank_grid(connection: Connection, run: str, table: RankTable, *, whole_step: bool) -> Grid:
    """Return the strips of all ranks against the median rank: the time without waiting, or the whole step."""
    if table.last_step is None:
        return empty_grid("no step times")
    name = STEP_SECONDS if whole_step else STEP_PHASE_SECONDS
    phases = read_phases(connection, run, table.attempt, table.last_step, name)
    if not phases.ranks:
        return empty_grid("no step times by rank")
    own = own_seconds(phases.seconds, phases.phases)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = own / row_medians(own.T)[None, :]  # of each step, so that a common slow-down hides no rank
    low, high = _STRIP_SCALE
    code = np.clip((ratio - low) / (high - low), 0, 1) * LEVELS
    cells = np.where(np.isfinite(ratio), np.nan_to_num(code), ABSENT).astype(np.uint8)
    known = dict(zip(phases.ranks, cells, strict=True))
    absent = np.full(len(phases.steps), ABSENT, np.uint8)
    full = np.array([known.get(row.rank, absent) for row in table.rows])
    places = [(table.attempt, step, step) for step in phases.steps]
    names, notice = [f"rank {row.rank}" for row in table.rows], f"newest {len(phases.steps):,} steps"
    return plain_grid(full, names, places, scale=_STRIP_SCALE, is_log=False, notice=notice)


SLOW: Final = 0.15
"""Least share of the time of a step that the others wait for a slow rank. Ranks that share cores often reach 0.1."""

_MOST_STEPS: Final = 0.8
_FEWEST_PAUSES: Final = 3
_FEWEST_STEPS: Final = 40
_LARGER: Final = 4.0
_PAUSE_SHARE: Final = 0.5
_LEAST_PAUSE: Final = 0.05  # seconds: shorter ones are those of cores that other programs use


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank that makes the others wait, as means of the steps that were compared. `row` is its place in the array."""

    row: int
    seconds: float
    """Seconds of a step by which its own time exceeds that of the others, which wait for as long."""
    share: float
    """`seconds` divided by the time of a step."""
    phase: str
    """The phase that takes the largest part of the time."""
    steps: int
    """Number of steps that were compared."""
    pauses: int
    """Number of steps with a pause of at least half a step; 0 for a rank that is slow in most steps."""
    since: int | None = None
    """The step since which the rank is slow; None if it pauses, or is slow in all steps that are known."""

    @property
    def words(self) -> str:
        """Return the share of the others' wait and the phase as a text."""
        slow = f"pauses in {self.pauses} of {self.steps} steps, in" if self.pauses else "is slow in"
        wait = f"the others wait {self.seconds:.3g} s a step, {100 * self.share:.0f} % of the time"
        since = "" if self.since is None else f", since step {self.since:,}"
        return f"{slow} {self.phase.replace('_', ' ')}: {wait}{since}"


def own_phases(seconds: Floats, phases: Sequence[str]) -> list[int]:
    """Return the places of the phases in which a rank does not wait for others."""
    waits = [place for place, phase in enumerate(phases) if phase == Phase.COLLECTIVE]
    has_waits = bool(np.nansum(seconds[:, :, waits]) > 0)
    others = {Phase.COLLECTIVE, Phase.FIRST_STEP} | (set() if has_waits else COMPUTING)
    return [place for place, phase in enumerate(phases) if phase not in others]


def own_seconds(seconds: Floats, phases: Sequence[str]) -> Floats:
    """Return the own time [ranks, steps] in `seconds` [ranks, steps, phases]. A missing step is NaN."""
    own: Floats = seconds[:, :, own_phases(seconds, phases)].sum(axis=2)
    return own


def of_others(values: Floats) -> Floats:
    """Return the median of the other ranks along the first axis; the median of all ranks if there are more than two."""
    if len(values) == 2:
        return values[::-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step that no rank has
        return np.broadcast_to(np.nanmedian(values, axis=0), values.shape)


def find_slow_ranks(
    seconds: Floats, phases: Sequence[str], numbers: Sequence[int], *, steps: int = 20
) -> list[SlowRank]:
    """Return the slow ranks in `seconds` [ranks, steps, phases], the slowest first. A missing step is NaN.

    A rank is slow if the others wait for it for the share SLOW of the step, in four fifths of the newest `steps` and in
    their sum; or if it alone has pauses of half a step and 50 ms or more that take this share of all steps, and come
    and go. `numbers` are the numbers of the steps.
    """
    if len(seconds) < 2 or not seconds.shape[1]:
        return []
    own, whole = own_seconds(seconds, phases), np.nansum(seconds, axis=2)
    late, places = own - of_others(own), own_phases(seconds, phases)
    # Collectives of a forward pass, such as those of buffers or shards, are not timed apart: others wait in it for a
    # rank that is late with its data, and their longer computation hides its time.
    data = seconds[:, :, [place for place, phase in enumerate(phases) if phase == Phase.DATA_WAIT]].sum(axis=2)
    later = data - of_others(data)
    late = np.where(late - later <= -0.5 * later, np.maximum(late, later), late)
    usual_step = np.nanmedian(np.where(np.isfinite(late), whole, np.nan))
    is_pause = late > max(_PAUSE_SHARE * usual_step, _LEAST_PAUSE)
    paused, found = np.where(is_pause, late, 0.0).sum(axis=1), []
    for row in range(len(own)):
        known, pauses = (np.flatnonzero(flags) for flags in (np.isfinite(late[row]), is_pause[row]))
        chosen = known[-steps:]
        is_late = late[row, chosen] >= SLOW * whole[row, chosen]
        if len(chosen) == steps and np.mean(is_late) >= _MOST_STEPS:
            pauses = pauses[:0]
        elif (
            len(known) >= max(2 * steps, _FEWEST_STEPS)
            # Pauses come and go: a stretch of slow steps, after which the cause is gone, is none.
            and np.sum(np.diff(pauses, prepend=-2) > 1) >= max(_FEWEST_PAUSES, len(pauses) / 2)
            and not is_late[-_FEWEST_PAUSES:].all()
            and paused[row] > _LARGER * np.delete(paused, row).max()
        ):
            # After a longer time without a pause than between two of them, the cause is gone.
            chosen = known if known[-1] - pauses[-1] <= 2 * np.diff(pauses).max() else known[:0]
        else:
            continue
        waited, spent = late[row, chosen].sum(), whole[row, chosen].sum()
        if not waited >= SLOW * spent > 0:
            continue
        mine, usual = (one[row, chosen].mean(axis=0) for one in (seconds, of_others(seconds)))
        found.append(
            SlowRank(
                row=row,
                seconds=float(waited / len(chosen)),
                share=float(waited / spent),
                phase=phases[places[int(np.argmax((mine - usual)[places]))]],
                steps=len(chosen),
                pauses=len(pauses),
                since=None if len(pauses) else _slow_since(late[row, known], known, numbers, len(chosen)),
            )
        )
    return sorted(found, key=lambda one: -one.share)


def _slow_since(late: Floats, known: npt.NDArray[np.intp], numbers: Sequence[int], newest: int) -> int | None:
    """Return the step since which a rank is late by more than half of its present time; None if in all."""
    is_usual = ~(late > float(np.median(late[-newest:])) / 2)
    usual = np.flatnonzero(is_usual[:-1] & is_usual[1:])  # one step alone may be chance
    return int(numbers[known[min(int(usual[-1]) + 2, len(known) - 1)]]) if len(usual) else None
