"""The list of runs with their newest values and sparklines, and the header of one run."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from rankscope_contract.model.events import RunState
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.base.rule_names import RUN_FAILED, RUN_SLOW, SLOW_RANK
from rankscope_storage.connection import Connection
from rankscope_storage.runs.tags import parse_tags
from rankscope_storage.sql.scalar_history import is_main_source
from rankscope_view.data.incidents import Incident, happening, in_order, incidents, sentence_of
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

STOPPING: Final = "stopping"
"""State that pages show while a run is active and one of its processes has reported its exit."""

ENDED: Final = frozenset({RunState.COMPLETED, RunState.STOPPED, RunState.FAILED})

_RUNS: Final = """\
SELECT run, state, reason, planned_steps, last_step, epoch(started_at) AS started_at, epoch(ended_at) AS ended_at,
  epoch(ts) AS updated_at, source_kind, tags, note, world_size, attempt FROM runs"""

_LAST_ROWS: Final = """\
SELECT run, max(coalesce(attempt, 0)) AS attempt, epoch(max(ts)) AS logged_at,
  arg_max(position, (coalesce(attempt, 0), position)) AS position FROM scalars
WHERE run IN (SELECT unnest($runs)) AND position IS NOT NULL AND NOT starts_with(name, 'eval') GROUP BY run"""
_LOSSES_APART: Final = f"""\
SELECT run, (max(position) - min(position)) / greatest(count(DISTINCT position) - 1, 1) AS apart
FROM scalars WHERE run IN (SELECT unnest($runs)) AND name = 'loss' AND value IS NOT NULL AND {is_main_source()}
GROUP BY run, coalesce(attempt, 0) QUALIFY coalesce(attempt, 0) = max(coalesce(attempt, 0)) OVER (PARTITION BY run)"""
_NO_TAGS: Final = (None, "", "{}")
_COLUMNS: Final = (
    *("state", "reason", "planned_steps", "last_step", "started_at", "ended_at"),
    *("updated_at", "source_kind", "tags", "note", "world_size", "attempt"),
)
_LEAVING: Final = """\
SELECT DISTINCT run FROM events JOIN (SELECT run, coalesce(attempt, 0) AS newest FROM runs) USING (run)
WHERE type = 'exit' AND coalesce(attempt, 0) = newest AND run IN (SELECT unnest($runs))"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparkline:
    """At most 60 points of the loss in the order of arrival, with their numbers among `places` rows; NaN is kept."""

    points: tuple[tuple[int, float], ...] = ()
    places: int = 0


NO_CURVE: Final = Sparkline()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run of the list. A value of None is unknown. Times are UTC seconds."""

    run: str
    state: str | None
    reason: str | None
    step: int | None
    planned_steps: int | None
    started_at: float | None
    ended_at: float | None
    seen_at: float | None
    source_kind: str | None
    world_size: int | None
    attempt: int | None
    tags: Mapping[str, str] = field(default_factory=dict)
    note: str | None = None
    loss: float | None = None  # mean over the ranks that logged it at its newest step
    loss_step: int | None = None
    is_loss_late: bool = False  # further ones should have followed it
    loss_ranks: int = 0  # number of these ranks; 0 for a log without ranks
    loss_ranks_missing: int = 0  # ranks that logged the loss before, and not at its newest step
    learning_rate: float | None = None
    speed: float | None = None  # median of the newest steps
    speed_name: str | None = None  # one of SPEEDS
    speeds: Mapping[str, float] = field(default_factory=dict)  # all by name: of a throughput the sum over ranks
    eta_seconds: float | None = None  # None: unknown or ended
    sparkline: Sparkline = NO_CURVE
    incidents: tuple[Incident, ...] = ()  # open ones, the most urgent first
    is_ruined: bool = False  # it failed, or the cause of an incident that is not about speed was never seen to be gone

    @property
    def share(self) -> float | None:
        """Return the share of the planned steps that are done, from 0 to 1; None without a plan."""
        if self.step is None or not self.planned_steps:
            return None
        return min(1.0, max(0.0, self.step / self.planned_steps))

    @property
    def loss_note(self) -> str:
        """Return that the loss has ended, or the number of ranks in its mean if ranks are missing: `1 of 2 ranks`."""
        if self.is_loss_late:
            return f"no loss since step {self.loss_step:,}"
        of = self.loss_ranks + self.loss_ranks_missing
        return f"{self.loss_ranks} of {of} ranks" if self.loss_ranks_missing else ""

    @property
    def end_sentence(self) -> str:
        """Return the sentence which states that the run has ended with open incidents; empty if that is not so."""
        return end_sentence(self.state, self.incidents)

    @property
    def is_live(self) -> bool:
        """Return whether the run has not ended, so that pages follow it. A run without a state is history."""
        return _is_live(self.state)


def _is_live(state: str | None) -> bool:
    return state is not None and state not in ENDED


def open_count(number: int, which: str = "") -> str:
    """Return a number of open incidents as text, such as `2 open incidents`. `which` is put before `open`."""
    return f"{number:,} {which}open incident{'' if number == 1 else 's'}"


def end_sentence(state: str | None, found: Sequence[Incident]) -> str:
    """Return the sentence which states that a run in `state` has ended with the open incidents `found`, or ""."""
    return open_sentence(state, found) if state in ENDED else ""


def open_sentence(state: str | None, found: Sequence[Incident]) -> str:
    """Return the sentence which states that a run in `state` has the open incidents `found`; empty without any.

    Of a failed run, it begins with the step and the exception.
    """
    if not found:
        return ""
    failure = max((one for one in found if one.rule == RUN_FAILED), key=in_order, default=None)
    if failure is None or state != RunState.FAILED:
        return f"{(state or 'unknown').capitalize()} with {open_count(len(found))}: {sentence_of(found[0])}."
    step = "" if failure.step is None else f" at step {failure.step:,}"
    others = [one for one in found if one is not failure]
    more = f" It has {open_count(len(others), 'further ')}: {sentence_of(others[0])}." if others else ""
    return f"Failed{step}: {happening(failure).rstrip('.')}.{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunQuery:
    """Selection of the list: words of the name, tags `key=value`, a state, the sort key, and the page."""

    words: tuple[str, ...] = ()
    tags: tuple[tuple[str, str], ...] = ()
    state: str | None = None
    sort: str = "seen"
    is_descending: bool = True
    page: int = 0

    @classmethod
    def parse(cls, text: str, *, state: str | None = None, sort: str = "", page: int = 0) -> RunQuery:
        """Return the query for the search text `text`, such as `llama tag:team=post state:failed`."""
        words, tags = [], []
        for word in text.split():
            if word.startswith("tag:"):
                key, _, value = word[4:].partition("=")
                tags.append((key, value))
            elif word.startswith("state:"):
                state = word[6:]
            else:
                words.append(word.lower())
        key, down = sort.removeprefix("-") or "seen", sort.startswith("-") or not sort
        chosen, labels = tuple(words), tuple(tags)
        return cls(words=chosen, tags=labels, state=state or None, sort=key, is_descending=down, page=page)


INCIDENTS: Final = "incidents"
"""Value of `RunQuery.state` that selects runs with open incidents."""

PAGE_RUNS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RunList:
    """One page of the list of runs, the number of runs that the query selects, and the number of runs by state."""

    query: RunQuery
    rows: tuple[RunRow, ...]
    selected: int
    total: int
    states: Mapping[str, int]
    with_incidents: int


def run_list(connection: Connection, query: RunQuery) -> RunList:
    """Return one page of the runs of a store."""
    with connection.pinned():
        known = known_runs(connection)
        states = Counter(row["state"] or "unknown" for row in known)
        found = incidents(connection, [row["run"] for row in known])
        troubled = {run for run, listed in found.items() if any(one.is_open for one in listed)}
        chosen = [row for row in known if _matches(row, query, troubled)]
        scalars = read_rows(connection, [row["run"] for row in chosen] if query.sort == "loss" else [], [LOSS])
        chosen.sort(key=lambda row: _sort_key(row, query.sort, scalars), reverse=query.is_descending)
        shown = chosen[query.page * PAGE_RUNS : (query.page + 1) * PAGE_RUNS]
        rows = _complete(connection, shown, found)
    counts = {"selected": len(chosen), "total": len(known), "with_incidents": len(troubled)}
    return RunList(query=query, rows=tuple(rows), states=states, **counts)


def run_row(connection: Connection, run: str, rows: ScalarRows | None = None) -> RunRow | None:
    """Return the row of `run` without its sparkline, or None if the store does not contain it.

    `rows` has its scalars, if they were read before.
    """
    with connection.pinned():
        has_rows = rows is not None and any(name == run for name, _ in rows.parts)
        known = [row for row in known_runs(connection, run, has_rows=has_rows) if row["run"] == run]
        found = incidents(connection, [run]) if known else {}
        return next(iter(_complete(connection, known, found, has_curves=False, rows=rows)), None)


def known_runs(connection: Connection, run: str | None = None, *, has_rows: bool = False) -> list[dict[str, Any]]:
    """Return the row of each run in the dataset `runs`, or of `run`, and a row of nulls for each other run with rows.

    Runs without a row in `runs` are found by the names in the Delta log, and by a scan of a store without that dataset.
    With `has_rows`, the caller has found rows of `run`, and nothing is scanned.
    """
    chosen = "" if run is None else f" WHERE run = {sql_string(run)}"
    rows: list[dict[str, Any]] = connection.query(_RUNS + chosen).to_pylist()
    names = {row["run"] for row in rows}
    others = {run} if run is not None and has_rows else set()
    for dataset in ("scalars", "events", "tensor_stats") if not others else ():
        files = connection.files_table(dataset, run=run)
        pairs = zip(files["run_min"].to_pylist(), files["run_max"].to_pylist(), strict=True)
        others |= {low for low, high in pairs if low is not None and low == high}
    if not names and not others:
        for dataset in ("scalars", "events", "tensor_stats"):
            others |= set(connection.query(f"SELECT DISTINCT run FROM {dataset}{chosen}")["run"].to_pylist())
    empty = dict.fromkeys(_COLUMNS)
    rows += [empty | {"run": name} for name in sorted(others - names) if run is None or name == run]
    running = [row["run"] for row in rows if row["state"] == RunState.RUNNING]
    leaving = set(connection.query(_LEAVING, {"runs": running})["run"].to_pylist()) if running else set()
    for row in rows:
        row["state"] = STOPPING if row["run"] in leaving else row["state"]
        row["tags"] = parse_tags(row["tags"]) if row["tags"] not in _NO_TAGS else {}
    return rows


def _matches(row: Mapping[str, Any], query: RunQuery, troubled: Collection[str]) -> bool:
    if query.words:
        text = " ".join((row["run"], *(f"{key}={value}" for key, value in row["tags"].items()))).lower()
        if not all(word in text for word in query.words):
            return False
    if not all(row["tags"].get(key) == value if value else key in row["tags"] for key, value in query.tags):
        return False
    if query.state == INCIDENTS:
        return row["run"] in troubled
    return query.state is None or (row["state"] or "unknown") == query.state


def _sort_key(row: Mapping[str, Any], sort: str, scalars: ScalarRows) -> tuple[Any, ...]:
    value: Any
    match sort:
        case "run":
            value = row["run"].lower()
        case "state":
            value = row["state"] or ""
        case "progress":
            value = (row["last_step"] or 0) / (row["planned_steps"] or math.inf)
        case "loss":
            losses = scalars.main(row["run"], LOSS)
            loss = math.nan if losses is None else _newest(losses, 1)["value"]
            value = -math.inf if math.isnan(loss) else loss
        case _:
            value = row["ended_at"] or row["updated_at"] or row["started_at"] or -math.inf
    return value, row["run"]


def _complete(
    connection: Connection,
    known: Iterable[Mapping[str, Any]],
    found: Mapping[str, Sequence[Incident]],
    *,
    has_curves: bool = True,
    rows: ScalarRows | None = None,
) -> list[RunRow]:
    known = list(known)
    rows = rows or read_rows(connection, [row["run"] for row in known], set(_SHOWN))
    # The service stores the step of a followed log rarely, and its rows need no scalar that the list shows.
    logs = [row["run"] for row in known if _is_live(row["state"]) and row["source_kind"] not in {None, "live"}]
    last = connection.query(_LAST_ROWS, {"runs": logs}).to_pylist() if logs else []
    of_log = {line["run"]: line for line in last}
    found_rows = [
        _run_row(row, rows, of_log.get(row["run"]), found.get(row["run"], ()), has_curve=has_curves) for row in known
    ]
    lags = {one.run: lag for one in found_rows if (lag := (one.step or 0) - (one.loss_step or math.inf)) > 10}
    apart = connection.query(_LOSSES_APART, {"runs": list(lags)}).to_pylist() if lags else ()
    late = {line["run"] for line in apart if lags[line["run"]] > 5 * line["apart"]}
    return [replace(one, is_loss_late=one.run in late) for one in found_rows]


def _run_row(
    row: Mapping[str, Any],
    scalars: ScalarRows,
    of_log: Mapping[str, Any] | None,
    listed: Sequence[Incident],
    *,
    has_curve: bool,
) -> RunRow:
    """Return a run with its newest values. `of_log` is the last row of a followed log."""
    is_live = _is_live(row["state"])
    series = _shown_series(scalars, row["run"], row["attempt"] if is_live else None)
    latest = {name: _newest(one, SPEED_STEPS if name in SPEEDS else 1) for name, one in series.items()}
    loss = latest.get(LOSS, {})
    speeds: dict[str, float] = {
        name: latest[name]["value" if name in {"step_seconds", "steps_per_second"} else "total"]
        for name in SPEEDS
        if name in latest
    }
    speed_name = next(iter(speeds), None)
    rows = [*latest.values(), *([] if of_log is None else [of_log])]
    newest_attempt = max((one["attempt"] for one in rows), default=0)
    attempt_of_row = row["attempt"] or 0 if of_log is None else -1  # a log has one last step for all attempts
    placed = [*((one["attempt"], one["position"]) for one in rows), (attempt_of_row, row["last_step"])]
    positions = [step for attempt, step in placed if step is not None and attempt >= newest_attempt]
    times = [one["logged_at"] for one in rows if one["logged_at"] is not None]
    is_paced = is_live and row["state"] != RunState.STALLED
    has_curve = has_curve and LOSS in series
    return RunRow(
        **{name: row[name] for name in ("run", *_COLUMNS) if name not in {"last_step", "updated_at"}},
        step=_done(row, positions),
        seen_at=max(times, default=row["ended_at"] or row["updated_at"]),
        loss=loss.get("value"),
        loss_step=loss.get("position"),
        loss_ranks=loss.get("ranks", 0),
        loss_ranks_missing=loss.get("missing", 0),
        learning_rate=latest.get(LEARNING_RATE, {}).get("value"),
        speed=speeds.get(speed_name or ""),
        speed_name=speed_name,
        speeds=speeds,
        eta_seconds=_seconds_left(list(series.values()), row["planned_steps"]) if is_paced else None,
        sparkline=_sparkline(by_step(series[LOSS])[0]["value"]) if has_curve else NO_CURVE,
        incidents=tuple(one for one in listed if one.is_open),
        is_ruined=row["state"] == RunState.FAILED
        or any(not one.is_resolved and one.rule not in {SLOW_RANK, RUN_SLOW} for one in listed),
    )


def _done(row: Mapping[str, Any], positions: Sequence[int]) -> int | None:
    """Return the last completed step: a failed or stopped run also has rows of the step in which it ended."""
    is_cut = row["state"] == RunState.FAILED or (row["state"] == RunState.STOPPED and row["source_kind"] == "live")
    return row["last_step"] if is_cut and row["last_step"] is not None else max(positions, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Further facts for the header of one run. The goodput is None without step times, or if it was left out."""

    attempts: int
    hosts: tuple[str, ...]
    versions: Mapping[str, str]
    goodput: float | None
    lost_seconds: float | None
    wall_seconds: float | None
    config: str | None  # JSON
    lacks_goodput: bool = False  # too many step times: it takes long to calculate


_FACTS: Final = """\
SELECT (SELECT count(*) FROM attempts WHERE run = $run) AS attempts,
  (SELECT arg_max(config, coalesce(ordinal, 0)) FROM runs_history WHERE run = $run AND config IS NOT NULL) AS config"""
_LAUNCHES: Final = """\
SELECT DISTINCT details->>'$.host' AS host, details->>'$.versions' AS versions FROM events
WHERE run = $run AND type = 'launch' AND json_valid(details) ORDER BY host"""
_GOODPUT: Final = """\
SELECT goodput, wall_seconds, wall_seconds - useful_seconds AS lost FROM goodput
WHERE run = $run AND useful_seconds > 0"""


def run_facts(connection: Connection, run: str, *, with_goodput: bool | None = True) -> RunFacts:
    """Return further facts about `run` for its header.

    `with_goodput` is False for a run without step times, and None to leave the goodput out.
    """
    parameters = {"run": run}
    with connection.pinned():
        facts = connection.query(_FACTS, parameters).to_pylist()[0]
        launches = connection.query(_LAUNCHES, parameters).to_pylist()
        spent = run_goodput(connection, run) if with_goodput else NO_GOODPUT
    versions = parse_tags(next((one["versions"] for one in launches if one["versions"]), None))
    hosts = tuple(dict.fromkeys(one["host"] for one in launches if one["host"]))
    return RunFacts(
        attempts=facts["attempts"],
        hosts=hosts,
        versions=versions,
        goodput=spent["goodput"],
        lost_seconds=spent["lost"],
        wall_seconds=spent["wall_seconds"],
        config=facts["config"],
        lacks_goodput=with_goodput is None,
    )


NO_GOODPUT: Final[Mapping[str, float | None]] = dict.fromkeys(("goodput", "wall_seconds", "lost"))


def run_goodput(connection: Connection, run: str) -> Mapping[str, float | None]:
    """Return goodput, wall time and lost time of `run` by the names `goodput`, `wall_seconds` and `lost`."""
    rows: list[Mapping[str, float | None]] = connection.query(_GOODPUT, {"run": run}).to_pylist()
    return rows[0] if rows else NO_GOODPUT


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


def _shown_series(rows: ScalarRows, run: str, last: int | None) -> dict[str, SeriesRows]:
    """Return the scalars that the list shows, up to the attempt `last`: a younger one has ended before it."""
    series = {name: one for name in _SHOWN if (one := rows.main(run, name)) is not None}
    for name, one in series.items():
        own = one.attempt <= (math.inf if last is None else last)
        series[name] = one if own.all() or not own.any() else one.select(own)
    return series


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
    bounds = np.linspace(0, places, min(SPARKLINE_POINTS // 3, places) + 1, dtype=np.int64)
    is_finite = np.isfinite(values)
    bad, ends = np.flatnonzero(~is_finite), bounds[1:] - 1
    ends[np.searchsorted(bounds, bad, "right") - 1] = bad  # the last one of each part
    low, high = np.where(is_finite, values, np.inf), np.where(is_finite, values, -np.inf)
    kept = set(ends.tolist())
    for first, last in itertools.pairwise(bounds.tolist()):
        kept |= {first + int(low[first:last].argmin()), first + int(high[first:last].argmax())}
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
