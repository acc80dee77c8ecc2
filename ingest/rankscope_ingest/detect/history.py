"""Read the state that earlier service processes stored, when the service starts.

The state consists of attempt numbers, active attempts, open incidents and similar facts. All of it is derived from rows
of the store; the service stores no other local state.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope_contract.model.events import EventType, RunState
from rankscope_ingest.detect.divergence import Diverged, largest_first
from rankscope_ingest.detect.incidents import MOST_ENDED, IncidentTracker, exit_report, parse_details
from rankscope_ingest.pipeline.rows import SYMPTOM_COLUMNS, GivenUp, Row
from rankscope_ingest.runs.incident import (
    MUTED,
    NOTIFIED,
    OPENED,
    UNDELIVERED,
    Incident,
    LogReport,
    Symptom,
    failure_key,
)
from rankscope_ingest.runs.models import Attempt, Liveness, Rank
from rankscope_ingest.runs.tracker import RunTracker
from rankscope_storage.base.datasets import DATASETS, DIMENSIONS, ROLLUPS
from rankscope_storage.base.rule_names import RUN_FAILED, RUN_STALLED, WITH_SENTENCE
from rankscope_storage.connection import Connection
from rankscope_storage.sql.views import HISTORY_SUFFIX
from rankscope_view.data.incidents import is_open

_ATTEMPTS: Final = "SELECT * FROM attempts WHERE source_kind = 'live' ORDER BY run, attempt"
_IMPORTED: Final = """\
SELECT run, max(attempt) AS attempt FROM attempts WHERE source_kind <> 'live' AND attempt IS NOT NULL GROUP BY run"""
_RANKS: Final = """\
SELECT run, attempt, rank, incarnation, type, details, ts FROM events
WHERE (type = 'launch' AND ts_origin = 'ingest' OR type = 'exit') AND rank IS NOT NULL AND (run, attempt) IN (
  SELECT (run, attempt) FROM attempts WHERE state NOT IN ('completed', 'stopped'))
ORDER BY ordinal"""
_SERVICE_JUMPS: Final = """\
SELECT run, attempt, sum(value) AS seconds FROM events
WHERE type = 'clock' AND ts_origin = 'ingest' AND incarnation IS NULL GROUP BY run, attempt"""
# The events of records that have arrived since have a negative value.
_GIVEN_UP: Final = """\
SELECT incarnation, sum(value)::BIGINT AS records,
  coalesce(max(CASE WHEN json_valid(details) THEN TRY_CAST(details->>'$.last' AS BIGINT) END), -1) AS last FROM events
WHERE type = 'gap' AND ts_origin = 'ingest' AND seq IS NULL AND incarnation IS NOT NULL
GROUP BY incarnation HAVING sum(value) > 0"""
_PROCESSES: Final = """\
SELECT incarnation, attempt FROM events
WHERE type = 'launch' AND ts_origin = 'ingest' AND incarnation IS NOT NULL"""
_INCIDENTS: Final = """\
SELECT run, attempt, rank, step, severity, details, rule, kind, tensor, op, value, baseline, threshold, message,
  greatest(epoch(now()) - epoch(ts), 0) AS age FROM events
WHERE type = 'incident' AND ts_origin = 'ingest' ORDER BY ordinal"""
# The events of an incident do not contain the anomalies that joined it later.
_LAST_ANOMALIES: Final = """\
SELECT run, attempt, rule, max(step) AS step, greatest(epoch(now()) - epoch(max(ts)), 0) AS age FROM events
WHERE type = 'anomaly' AND (run, attempt) IN (
  SELECT (run, attempt) FROM attempts WHERE state NOT IN ('completed', 'stopped', 'failed'))
GROUP BY run, attempt, rule HAVING max(step) IS NOT NULL"""
_DIVERGENCES: Final = """\
SELECT * FROM (
  SELECT run, attempt, step, kind, tensor, vpp_stage, details, type, ordinal,
    CASE WHEN json_valid(details) THEN details->>'$.replicas' END AS replicas FROM events
  WHERE rule = 'ReplicaDesync' AND ts_origin = 'ingest' AND type IN ('anomaly', 'note') AND step IS NOT NULL
  QUALIFY ordinal = max(ordinal) OVER (PARTITION BY run, attempt, kind, tensor, vpp_stage, replicas)
) WHERE type = 'anomaly' ORDER BY ordinal"""

# Steps that all ranks of a group have reached were compared. The hashes of later steps are still needed.
_HASHES: Final = """\
WITH live AS (SELECT run, attempt FROM attempts WHERE state NOT IN ('completed', 'stopped', 'failed')),
last AS (
  SELECT run, attempt, replicas, rank, max(step) AS step FROM hashes
  WHERE replicas IS NOT NULL AND (run, attempt) IN (SELECT (run, attempt) FROM live)
  GROUP BY run, attempt, replicas, rank
),
reached AS (SELECT run, attempt, replicas, min(step) AS step FROM last GROUP BY run, attempt, replicas)
SELECT hashes.run, hashes.attempt, hashes.rank, hashes.step, hashes.replicas, kind, tensor, vpp_stage, hash
FROM hashes JOIN reached ON hashes.run = reached.run AND hashes.attempt = reached.attempt
  AND hashes.replicas = reached.replicas AND hashes.step > reached.step
ORDER BY hashes.ordinal"""

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """State of runs and incidents that earlier service processes left in the store.

    `run_starts` contains the start of the first attempt of each run in UTC µs. `last_ordinal` is the highest arrival
    number of any row; new arrival numbers must be higher even if the system clock was set back.
    """

    attempts: tuple[Attempt, ...] = ()
    imported: Mapping[str, int] = field(default_factory=dict)  # highest attempt of each run from a log
    run_starts: Mapping[str, int] = field(default_factory=dict)
    open_incidents: tuple[Incident, ...] = ()  # of active attempts, and the newest ones of ended attempts
    past_incidents: tuple[Incident, ...] = ()  # of active attempts
    open_stalls: tuple[Incident, ...] = ()
    unsent: tuple[Incident, ...] = ()
    announced_failures: frozenset[str] = frozenset()
    last_ordinal: int = 0
    given_up: Mapping[str, GivenUp] = field(default_factory=dict)  # counted as lost and not arrived, by incarnation
    diverged: tuple[Diverged, ...] = ()  # of active attempts
    hashes: Sequence[Row] = ()  # of steps that not all ranks of a group have reached
    processes: Mapping[str, int] = field(default_factory=dict)  # attempts of all registered incarnations
    read_at: float = 0.0  # seconds of the service's monotonic clock

    @property
    def launches(self) -> list[tuple[str, str, int]]:
        """Return (run, launch id, attempt number) of each launch in the store.

        The attempts of imported logs are included, with an empty launch id, so that a later launch gets another number.
        """
        live = [(attempt.run, attempt.launch_id, attempt.number) for attempt in self.attempts if attempt.launch_id]
        return [*((run, "", number) for run, number in self.imported.items()), *live]

    def restore(self, runs: RunTracker, incidents: IncidentTracker) -> None:
        """Add the attempts of this history to `runs` and its incidents to `incidents`.

        Active attempts and open incidents continue, as does a failed attempt if its failure was not announced. All
        other attempts and incidents are only remembered as past ones.
        """
        for attempt in self.attempts:
            if not attempt.has_ended:
                runs.restore(attempt, self.read_at)
            elif attempt.state is RunState.FAILED and failure_key(*attempt.key) not in self.announced_failures:
                attempt.has_activity = bool(attempt.ranks)  # the failure is still to be announced
                runs.restore(attempt, self.read_at)
            else:
                runs.remember(attempt)
        for incident in self.open_incidents:
            incidents.restore(incident)
        for incident in self.past_incidents:
            incidents.remember(incident)


def read_history(store: Connection, now: float, owns: Callable[[str], bool] = lambda _: True) -> History:
    """Return the state that earlier service processes left in the store, of the runs for which `owns` returns true.

    The timeouts of ranks of active attempts start at `now`, because the store does not contain the times of heartbeats.
    """
    rows = [row for row in store.query(_ATTEMPTS).to_pylist() if owns(row["run"])]
    attempts = {(row["run"], row["attempt"]): _attempt(row) for row in rows}
    unfinished = {key: attempt for key, attempt in attempts.items() if not attempt.has_ended}
    for event in store.query(_RANKS).to_pylist():
        if attempt := attempts.get((event["run"], event["attempt"])):
            _add_rank(attempt, event, now)
    for jump in store.query(_SERVICE_JUMPS).to_pylist():
        if attempt := attempts.get((jump["run"], jump["attempt"])):
            attempt.clock_offset = round(jump["seconds"] * 1e6)
    starts: dict[str, int] = {}
    for attempt in attempts.values():
        starts[attempt.run] = min(starts.get(attempt.run, attempt.started_at), attempt.started_at)
    incidents = [(one, states) for one, states in stored_incidents(store, now) if owns(one.first.run)]
    own = [(one, not is_open(states)) for one, states in incidents if one.attempt_key in attempts and one.log is None]
    active = [(one, is_over) for one, is_over in own if one.attempt_key in unfinished]
    ended = [one for one, is_over in own if one.attempt_key not in unfinished and not is_over]
    _add_last_steps(store, [one for one, is_over in active if not is_over], now)
    anomalies = [(one, is_over) for one, is_over in active if one.first.rule not in {RUN_FAILED, RUN_STALLED}]
    return History(
        attempts=tuple(attempts.values()),
        imported={row["run"]: row["attempt"] for row in store.query(_IMPORTED).to_pylist()},
        run_starts=starts,
        open_incidents=(*ended[-MOST_ENDED:], *(one for one, is_over in anomalies if not is_over)),
        past_incidents=tuple(one for one, is_over in anomalies if is_over),
        open_stalls=tuple(one for one, is_over in active if one.first.rule == RUN_STALLED and not is_over),
        unsent=tuple(incident for incident, states in incidents if is_unsent(states)),
        announced_failures=frozenset(incident.key for incident, _ in incidents if incident.first.rule == RUN_FAILED),
        last_ordinal=_last_ordinal(store),
        given_up={row.pop("incarnation"): GivenUp(**row) for row in store.query(_GIVEN_UP).to_pylist()},
        diverged=tuple(item for item in read_diverged(store) if item.attempt_key in unfinished),
        hashes=[row for row in store.query(_HASHES).to_pylist() if owns(row["run"])],
        processes={row["incarnation"]: row["attempt"] for row in store.query(_PROCESSES).to_pylist()},
        read_at=now,
    )


def _add_last_steps(store: Connection, incidents: Iterable[Incident], now: float) -> None:
    """Set the last step and time of open incidents to those of the last anomaly of the same rule in the attempt."""
    last = {(row["run"], row["attempt"], row["rule"]): row for row in store.query(_LAST_ANOMALIES).to_pylist()}
    for one in incidents:
        row = last.get((*one.attempt_key, one.first.rule))
        if one.last_step is not None and row is not None:
            one.last_step, one.seen_at = max(one.last_step, row["step"]), max(one.began_at, now - row["age"])


def _last_ordinal(store: Connection) -> int:
    last = 0
    # Small datasets first: of the others, only row groups above `last` are read, according to their footers. Rollups
    # are days old: their attempts have later rows in other datasets.
    others = [name for name in DATASETS if name not in {*DIMENSIONS, *ROLLUPS.values()}]
    for dataset in (*DIMENSIONS, *others):
        view = f"{dataset}{HISTORY_SUFFIX}" if dataset in DIMENSIONS else dataset
        query = f"SELECT max(ordinal) AS last FROM {view} WHERE ordinal > {last}"  # noqa: S608 - our own names
        last = store.query(query).to_pylist()[0]["last"] or last
    return last


def _attempt(row: Mapping[str, Any]) -> Attempt:
    return Attempt(
        run=row["run"],
        number=row["attempt"],
        launch_id=row["launch_id"] or "",
        world_size=row["world_size"] or 1,
        started_at=_micros(row["started_at"]),
        planned_steps=row["planned_steps"],
        config=parse_details(row["config"]),
        state=RunState(row["state"]),
        reason=row["reason"],
        ended_at=_micros(row["ended_at"]) if row["ended_at"] else None,
        last_step=row["last_step"],
    )


def _add_rank(attempt: Attempt, event: Mapping[str, Any], now: float) -> None:
    details = parse_details(event["details"])
    known = attempt.ranks.get(event["rank"])
    is_same = known is not None and known.incarnation == (event["incarnation"] or "")
    if event["type"] == EventType.LAUNCH:
        if is_same:
            return  # it registered with several services, and may have sent its exit report to an earlier one
        attempt.ranks[event["rank"]] = Rank(
            number=event["rank"],
            incarnation=event["incarnation"] or "",
            host=str(details.get("host", "")),
            liveness=Liveness(last_sign=now),
            known_since=now,
            is_restored=True,
            # Some ranks of a failed run are dead: a live one does not make the run active again.
            is_vanished=attempt.state is RunState.FAILED,
        )
    elif known is not None and is_same:
        known.exit_reason, known.error = exit_report(details)
        known.exited_at = _micros(event["ts"]) or None


def is_unsent(states: Collection[str]) -> bool:
    """Return whether an incident with these states has a message that was certainly not stored as sent."""
    return OPENED in states and not {NOTIFIED, UNDELIVERED, MUTED} & set(states)


def stored_incidents(store: Connection, now: float) -> list[tuple[Incident, list[str]]]:
    """Return each incident that is stored, with all its states in order.

    `now` is the time at which the incidents count as opened, in monotonic seconds.
    """
    latest: dict[str, tuple[Incident, list[str]]] = {}
    for row in store.query(_INCIDENTS).to_pylist():
        details = parse_details(row["details"])
        log = _log_report(details.get("log"))
        first = Symptom(
            run=row["run"],
            attempt=row["attempt"],
            rank=row["rank"],
            step=row["step"],
            severity=row["severity"],
            causal=(),  # smaller than any other, so that a restored incident keeps its name
            message=row["message"] if row["rule"] in WITH_SENTENCE else None,
            ranks=None if log is None else log.address,
            **{name: row[name] for name in SYMPTOM_COLUMNS},
        )
        incident = Incident(
            first=first,
            severity=row["severity"],
            opened_at=now,
            seen_at=now,
            began_at=now - row["age"],
            told_at=now - row["age"],
            is_listed=bool(details.get("listed")),
            last_step=details.get("last_step"),
            events=details.get("events", 1),
            ranks=set(details.get("ranks", ())),
            subjects={(str(rule), str(name)) for rule, name in details.get("subjects", ())},
            cause=None if details.get("cause") is None else str(details["cause"]),
            reports=tuple(map(str, details.get("reports", ()))),
            places=tuple(map(str, details.get("where", ()))),
            log=log,
            is_settled=True,
            fixed_key=str(details.get("key")),
        )
        earlier, states = latest.get(incident.key, (incident, []))
        state, at = str(details.get("state")), incident.began_at
        incident.began_at, incident.told_at = earlier.began_at, at if state == NOTIFIED else earlier.told_at
        latest[incident.key] = (incident, [*states, state])
    return list(latest.values())


def _log_report(details: object) -> LogReport | None:
    if not isinstance(details, dict):
        return None
    rows, guide = (tuple(map(str, details.get(name, ()))) for name in ("rows", "guide"))
    return LogReport(address=str(details.get("address")), rows=rows, guide=guide)


def _micros(moment: dt.datetime | None) -> int:
    return 0 if moment is None else (moment.astimezone(dt.UTC) - _EPOCH) // dt.timedelta(microseconds=1)


def read_diverged(store: Connection) -> list[Diverged]:
    """Return the tensors that were reported as diverged and that have not been reported as equal since."""
    rows = store.query(_DIVERGENCES).to_pylist()
    return [item for row in rows if (item := _diverged(row, parse_details(row["details"]))) is not None]


def _diverged(row: Mapping[str, Any], details: Mapping[str, Any]) -> Diverged | None:
    try:
        groups = largest_first((int(text, 16), tuple(map(int, ranks))) for text, ranks in details["hashes"].items())
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if len(groups) < 2:
        return None
    return Diverged(
        attempt_key=(row["run"], row["attempt"]),
        replicas=str(details.get("replicas")),
        ranks_by_hash=groups,
        **{name: row[name] for name in ("step", "kind", "tensor", "vpp_stage")},
    )
