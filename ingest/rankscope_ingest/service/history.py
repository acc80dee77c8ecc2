"""What a starting service reads back from the store: attempt numbers, and what had not ended. No local state."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import pyarrow as pa

from rankscope_contract.model.events import EventType, RunState
from rankscope_contract.model.rollups import ROLLUPS
from rankscope_contract.model.schema import DATASETS, DIMENSIONS
from rankscope_ingest.detect.divergence_tracker import Diverged
from rankscope_ingest.detect.incidents import IncidentTracker
from rankscope_ingest.detect.symptoms import last_word, parse_details
from rankscope_ingest.notify.announcer import OPENED, RESOLVED
from rankscope_ingest.notify.incident import Incident, Symptom
from rankscope_ingest.notify.text import RUN_FAILED, RUN_STALLED, failure_key
from rankscope_ingest.recovery.lost_records import GivenUp
from rankscope_ingest.runs.models import ENDED, Attempt, Liveness, Rank
from rankscope_ingest.runs.tracker import RunTracker
from rankscope_storage.sql.views import HISTORY_SUFFIX

_TOLD: Final = """\
SELECT run, attempt, step, kind, tensor, vpp_stage, details, type FROM events
WHERE rule = 'ReplicaDesync' AND ts_origin = 'ingest' AND type IN ('anomaly', 'note') AND step IS NOT NULL
ORDER BY ordinal"""

# What all ranks of a group have reached was compared; what one has not is still to be.
_WAITING: Final = """\
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


_NAMES: Final = ("run", "attempt", "kind", "tensor", "vpp_stage")


class Reader(Protocol):
    """A connection to the store."""

    def query(self, query: str) -> pa.Table:
        """Return the rows of an SQL query."""
        ...


def read_apart(reader: Reader) -> list[Diverged]:
    """Return the tensors that were told to be apart, and not to be equal again since."""
    found: dict[tuple[Any, ...], Diverged] = {}
    for row in reader.query(_TOLD).to_pylist():
        details = parse_details(row["details"])
        key = (*(row[name] for name in _NAMES), details.get("replicas"))
        if row["type"] != EventType.ANOMALY:
            found.pop(key, None)
        elif (item := _apart(row, details)) is not None:
            found[key] = item
    return list(found.values())


def read_hashes(reader: Reader) -> pa.Table:
    """Return the hashes of steps that not all ranks of their group have reached."""
    return reader.query(_WAITING)


def _apart(row: Mapping[str, Any], details: Mapping[str, Any]) -> Diverged | None:
    try:
        ranks_by_hash = tuple((int(text, 16), tuple(map(int, ranks))) for text, ranks in details["hashes"].items())
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    ranks_by_hash = tuple(sorted(ranks_by_hash, key=lambda camp: (-len(camp[1]), camp[1])))
    if len(ranks_by_hash) < 2:
        return None
    names = {name: row[name] for name in ("step", "kind", "tensor", "vpp_stage")}
    return Diverged(
        attempt_key=(row["run"], row["attempt"]),
        replicas=str(details.get("replicas")),
        ranks_by_hash=ranks_by_hash,
        **names,
    )


_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_SHOWN: Final = ("rule", "kind", "tensor", "op", "value", "baseline", "threshold")

_ATTEMPTS: Final = "SELECT * FROM attempts WHERE source_kind = 'live' ORDER BY run, attempt"
_RANKS: Final = """\
SELECT run, attempt, rank, incarnation, type, details, ts FROM events
WHERE (type = 'launch' AND ts_origin = 'ingest' OR type = 'exit') AND rank IS NOT NULL AND (run, attempt) IN (
  SELECT (run, attempt) FROM attempts WHERE state NOT IN ('completed', 'stopped'))
ORDER BY ordinal"""
_GIVEN_UP: Final = """\
SELECT incarnation, details FROM events
WHERE type = 'gap' AND ts_origin = 'ingest' AND seq IS NULL AND incarnation IS NOT NULL ORDER BY ordinal"""
_LIVES: Final = """\
SELECT incarnation, attempt FROM events
WHERE type = 'launch' AND ts_origin = 'ingest' AND incarnation IS NOT NULL"""
_INCIDENTS: Final = """\
SELECT run, attempt, rank, step, severity, details, rule, kind, tensor, op, value, baseline, threshold FROM events
WHERE type = 'incident' AND ts_origin = 'ingest' ORDER BY ordinal"""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the store tells. `run_starts` holds the start of each run's first attempt, UTC µs.

    `last_ordinal` is the highest arrival number of any row: a clock that was set back meanwhile must not go below it.
    """

    attempts: tuple[Attempt, ...] = ()
    run_starts: Mapping[str, int] = field(default_factory=dict)
    open_incidents: tuple[Incident, ...] = ()
    past_incidents: tuple[Incident, ...] = ()  # of what goes on
    open_stalls: tuple[Incident, ...] = ()
    unsent: tuple[Incident, ...] = ()
    failures_told: frozenset[str] = frozenset()
    last_ordinal: int = 0
    given_up: Mapping[str, GivenUp] = field(default_factory=dict)
    apart: tuple[Diverged, ...] = ()  # replicas, of attempts that go on
    hashes: pa.Table | None = None  # of steps that not all ranks had reached
    lives: Mapping[str, int] = field(default_factory=dict)  # incarnation -> attempt, of all that ever registered
    read_at: float = 0.0  # seconds of the service's monotonic clock

    @property
    def launches(self) -> list[tuple[str, str, int]]:
        """Return (run, launch_id, attempt) of every launch that is known."""
        return [(attempt.run, attempt.launch_id, attempt.number) for attempt in self.attempts if attempt.launch_id]

    def restore(self, runs: RunTracker, incidents: IncidentTracker) -> None:
        """Put back what had not ended, and remember what had."""
        for attempt in self.attempts:
            if not attempt.has_ended:
                runs.restore(attempt, self.read_at)
            elif attempt.state is RunState.FAILED and failure_key(*attempt.key) not in self.failures_told:
                attempt.has_news = bool(attempt.ranks)  # who was first is still to be told
                runs.restore(attempt, self.read_at)
            else:
                runs.remember(attempt)
        for incident in self.open_incidents:
            incidents.restore(incident)
        for incident in self.past_incidents:
            incidents.remember(incident)


def read_history(reader: Reader, now: float) -> History:
    """Return what `reader` tells. Ranks of unfinished attempts get until `now` plus patience to speak up."""
    rows = reader.query(_ATTEMPTS).to_pylist()
    attempts = {(row["run"], row["attempt"]): _attempt(row) for row in rows}
    unfinished = {key: attempt for key, attempt in attempts.items() if attempt.state not in ENDED}
    for event in reader.query(_RANKS).to_pylist():
        if attempt := attempts.get((event["run"], event["attempt"])):
            _add_rank(attempt, event, now)
    starts: dict[str, int] = {}
    for attempt in attempts.values():
        starts[attempt.run] = min(starts.get(attempt.run, attempt.started_at), attempt.started_at)
    incidents = _incidents(reader, now)
    known = [(incident, state == RESOLVED) for incident, state in incidents if incident.attempt_key in unfinished]
    of_anomalies = [(one, is_over) for one, is_over in known if one.first.rule not in {RUN_FAILED, RUN_STALLED}]
    return History(
        attempts=tuple(attempts.values()),
        run_starts=starts,
        open_incidents=tuple(one for one, is_over in of_anomalies if not is_over),
        past_incidents=tuple(one for one, is_over in of_anomalies if is_over),
        open_stalls=tuple(one for one, is_over in known if one.first.rule == RUN_STALLED and not is_over),
        unsent=tuple(incident for incident, state in incidents if state == OPENED),
        failures_told=frozenset(incident.key for incident, _ in incidents if incident.first.rule == RUN_FAILED),
        last_ordinal=_last_ordinal(reader),
        given_up=_given_up(reader),
        apart=tuple(item for item in read_apart(reader) if item.attempt_key in unfinished),
        hashes=read_hashes(reader),
        lives={row["incarnation"]: row["attempt"] for row in reader.query(_LIVES).to_pylist()},
        read_at=now,
    )


def _given_up(reader: Reader) -> dict[str, GivenUp]:
    """Return what was lost with processes that vanished, and was not found since: their records may still come."""
    found: dict[str, GivenUp] = {}
    for row in reader.query(_GIVEN_UP).to_pylist():
        details = parse_details(row["details"])
        last, records = details.get("last"), details.get("records")
        if isinstance(last, int) and isinstance(records, int):
            before = found.get(row["incarnation"], GivenUp(last=-1, records=0))
            found[row["incarnation"]] = GivenUp(last=max(before.last, last), records=before.records + records)
    return {incarnation: lost for incarnation, lost in found.items() if lost.records > 0}


def _last_ordinal(reader: Reader) -> int:
    last = 0
    # The small ones first: of the others only the parts that reach beyond are read, which their footers tell. Rollups
    # are of days ago: whatever was said of their attempts since came later.
    rolled_up = set(ROLLUPS.values())
    for dataset in (*DIMENSIONS, *(name for name in DATASETS if name not in rolled_up.union(DIMENSIONS))):
        view = f"{dataset}{HISTORY_SUFFIX}" if dataset in DIMENSIONS else dataset
        question = f"SELECT max(ordinal) AS last FROM {view} WHERE ordinal > {last}"  # noqa: S608 - our own names
        last = reader.query(question).to_pylist()[0]["last"] or last
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
            return  # it spoke to several services, and may have said its last word to an earlier one
        attempt.ranks[event["rank"]] = Rank(
            number=event["rank"],
            incarnation=event["incarnation"] or "",
            host=str(details.get("host", "")),
            liveness=Liveness(last_sign=now),
            known_since=now,
            is_restored=True,
            # Of a run that failed some ranks are dead for good: one that lives on does not bring the run back.
            is_vanished=attempt.state is RunState.FAILED,
        )
    elif known is not None and is_same:
        known.exit_reason, known.error = last_word(details)
        known.exited_at = _micros(event["ts"]) or None


def _incidents(reader: Reader, now: float) -> list[tuple[Incident, str]]:
    """Return each incident with the last state it is known to have reached."""
    latest: dict[str, tuple[Incident, str]] = {}
    for row in reader.query(_INCIDENTS).to_pylist():
        details = parse_details(row["details"])
        first = Symptom(
            run=row["run"],
            attempt=row["attempt"],
            rank=row["rank"],
            step=row["step"],
            severity=row["severity"],
            causal=(),  # smaller than any other: a restored incident keeps its name
            **{name: row[name] for name in _SHOWN},
        )
        incident = Incident(
            first=first,
            severity=row["severity"],
            opened_at=now,
            last_step=details.get("last_step"),
            events=details.get("events", 1),
            ranks=set(details.get("ranks", ())),
            cause=None if details.get("cause") is None else str(details["cause"]),
            reports=tuple(map(str, details.get("reports", ()))),
            lines=tuple(map(str, details.get("where", ()))),
            is_settled=True,
            fixed_key=str(details.get("key")),
        )
        latest[incident.key] = (incident, str(details.get("state")))
    return list(latest.values())


def _micros(moment: dt.datetime | None) -> int:
    return 0 if moment is None else (moment.astimezone(dt.UTC) - _EPOCH) // dt.timedelta(microseconds=1)
