"""Rows that the service adds to the store: launches, gaps, incidents, and versions of runs and attempts.

A version is a row with the state of a run or attempt at one time. The column `ts_origin` of these rows is "ingest". A
gap row, which reports lost records, has the seq of the last lost record. The store drops rows with a seq that it
already has. The store therefore drops a repeated gap row together with the repeated records around it. All other rows
have no seq. A repeated version of a run does not change any query result.

`LostRecords` counts each lost record once, and subtracts the record from the count if it arrives later.
`Target.given_up` is the seq of the last record that was counted as lost when the process was found dead. Records up to
this seq can still arrive: from a process that was only temporarily unreachable, or from the spool of the process,
possibly after a restart of this service.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.model.events import EventType, Severity, clock_jump
from rankscope_ingest.base.tables import FROM_INGEST, rows_table
from rankscope_ingest.live.progress import RunMeter
from rankscope_ingest.live.service_metrics import ServiceMetrics
from rankscope_ingest.record_channel.bodies import PlanColumns, ValidBody
from rankscope_ingest.runs.incident import Incident
from rankscope_ingest.runs.models import Attempt, AttemptKey, Target
from rankscope_ingest.runs.text import headline
from rankscope_storage.base.rule_names import WITH_SENTENCE

LIVE: Final = "live"

MAX_SUBJECTS: Final = 200
"""Maximum number of pairs of rule and tensor that the event of an incident contains."""

SYMPTOM_COLUMNS: Final = ("rule", "kind", "tensor", "op", "value", "baseline", "threshold")
"""Columns of the dataset `events` that describe an anomaly. Fields of the class `Symptom` have the same names."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stamp:
    """Time at which a row was created, in UTC µs, and arrival number of the row."""

    ts: int
    ordinal: int

    def columns(self) -> Row:
        """Return the columns `ts`, `ordinal` and `ts_origin` of the row to which this stamp belongs."""
        return {"ts": self.ts, "ordinal": self.ordinal, "ts_origin": FROM_INGEST}


def event_row(stamp: Stamp, kind: EventType, severity: str, message: str, details: object, /, **columns: Any) -> Row:
    """Return a row of `events` that the service creates.

    `details` is stored as JSON; `columns` has the values of further columns.
    """
    event = {"type": kind, "severity": severity, "message": message, "details": compact_json(details)}
    return {**stamp.columns(), **event, **columns}


def compact_json(value: object) -> str:
    """Return `value` as a JSON text without spaces and with sorted keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def launch_row(target: Target, stamp: Stamp) -> Row:
    """Return the row of `events` which reports that a process has registered."""
    process = target.registration
    details = {name: getattr(process, name) for name in ("launch_id", "host", "pid", "world_size", "versions")}
    details |= {} if process.served_by else {"url": process.url}
    message = f"rank {process.rank} of {process.world_size} registered from {process.host}, process {process.pid}"
    return event_row(stamp, EventType.LAUNCH, Severity.INFO, message, details, **_rank_columns(target))


def clock_row(attempt: Attempt, jump: int, stamp: Stamp) -> Row:
    """Return the row of `events` which reports that the clock of the service was set by `jump` µs."""
    message, details = clock_jump(jump, owner="service", remark="figures are corrected by it")
    columns = {"run": attempt.run, "attempt": attempt.number, "value": jump / 1e6}
    return event_row(stamp, EventType.CLOCK, Severity.WARNING, message, details, **columns)


def gap_row(target: Target, first: int, last: int, reason: str, stamp: Stamp) -> Row:
    """Return the row of `events` which reports that the records with seq `first` to `last` are lost."""
    records = last - first + 1
    details = {"first": first, "last": last, "records": records, "reason": reason}
    message = f"{records} record{'' if records == 1 else 's'} lost (seq {first} to {last}): {reason}"
    columns = _rank_columns(target) | {"seq": last, "value": float(records)}
    return event_row(stamp, EventType.GAP, Severity.WARNING, message, details, **columns)


def found_row(target: Target, first: int, last: int, stamp: Stamp) -> Row:
    """Return the row of `events` which reports that lost records with seq `first` to `last` have arrived.

    Its record count is negative, so that the sum over all gap events is correct.
    """
    records = last - first + 1
    details = {"first": first, "last": last, "records": -records, "reason": "the process was only out of reach"}
    message = f"{records} records that were counted as lost (seq {first} to {last}) have arrived"
    columns = _rank_columns(target) | {"value": float(-records)}
    return event_row(stamp, EventType.GAP, Severity.INFO, message, details, **columns)


def incident_row(incident: Incident, state: str, stamp: Stamp) -> Row:
    """Return the row of `events` which reports that an incident reached `state`.

    The states are opened, notified, undelivered, muted and resolved. The column `rank` is null if the incident names no
    single rank.
    """
    first = incident.first
    log = None if incident.log is None else dataclasses.asdict(incident.log)
    evidence = {
        "cause": incident.cause,
        "reports": incident.reports,
        "where": incident.places,
        "log": log,
        "listed": incident.is_listed,
    }
    details = {
        "key": incident.key,
        "state": state,
        "events": incident.events,
        "ranks": sorted(incident.ranks),
        "last_step": incident.last_step,
        "subjects": sorted(incident.subjects)[:MAX_SUBJECTS],
        **{name: value for name, value in evidence.items() if value},
    }
    columns = {name: getattr(first, name) for name in ("run", "attempt", "rank", "step", *SYMPTOM_COLUMNS)}
    reason = first.message if incident.log is None else incident.cause
    message = (reason if first.op is None or first.rule in WITH_SENTENCE else None) or headline(first)
    return event_row(stamp, EventType.INCIDENT, incident.severity, message, details, **columns)


def attempt_row(attempt: Attempt, stamp: Stamp) -> Row:
    """Return a row of `attempts`: a version of the attempt with its present state."""
    return _state_columns(attempt, stamp) | {"started_at": attempt.started_at, "launch_id": attempt.launch_id}


def _state_columns(attempt: Attempt, stamp: Stamp) -> Row:
    return {
        **stamp.columns(),
        "run": attempt.run,
        "attempt": attempt.number,
        "state": attempt.state,
        "ended_at": attempt.ended_at if attempt.has_ended else None,
        "planned_steps": attempt.planned_steps,
        "last_step": attempt.completed_step,
        "world_size": attempt.world_size,
        "source_kind": LIVE,
        "config": compact_json(attempt.config) if attempt.config else None,
        "reason": attempt.reason,
    }


def _rank_columns(target: Target) -> Row:
    process = target.registration
    return {"run": process.run, "attempt": target.attempt, "rank": process.rank, "incarnation": process.incarnation}


REFRESH_MICROSECONDS: Final = 60_000_000
"""Time in µs after which the present state of an active attempt is stored again, as a new row.

If the service crashes, the last step in the store is at most this old.
"""


class Versions:
    """Creates rows of `attempts` and `runs` with the present state, and rows of `tensors`.

    `stamp` returns the time and arrival number of a row.
    """

    def __init__(self, stamp: Callable[[], Stamp], run_starts: Mapping[str, int]) -> None:
        self._stamp = stamp
        self._run_starts = dict(run_starts)
        self._written: dict[AttemptKey, tuple[int, int | None]] = {}  # time and last step of the newest row
        self._known_plans: set[tuple[str, int, str]] = set()

    def of_attempt(self, attempt: Attempt, *, is_latest: bool) -> dict[str, pa.Table]:
        """Return tables by dataset, each with one row that has the present state of the attempt.

        The datasets are `attempts` and, if the attempt is the latest one of its run, `runs`.
        """
        stamp = self._stamp()
        self._written[attempt.key] = stamp.ts, attempt.completed_step
        start = self._run_starts.setdefault(attempt.run, attempt.started_at)
        tables = {"attempts": rows_table("attempts", [attempt_row(attempt, stamp)])}
        if is_latest:
            tables["runs"] = rows_table("runs", [_state_columns(attempt, stamp) | {"started_at": start}])
        return tables

    def set_clock(self, jump: int) -> None:
        """Record that the clock which `stamp` reads was set forward by `jump` µs."""
        self._written = {key: (at + jump, step) for key, (at, step) in self._written.items()}

    def due(self, attempts: Iterable[Attempt], wall: int) -> list[Attempt]:
        """Return the attempts whose state must be stored again.

        These are active attempts of which the state was last stored REFRESH_MICROSECONDS ago or earlier, and ended
        attempts of which later records have changed the last step. `wall` is the present time in UTC µs.
        """
        due = []
        for attempt in attempts:
            at, step = self._written.setdefault(attempt.key, (wall, None))
            if step != attempt.completed_step if attempt.has_ended else wall - at >= REFRESH_MICROSECONDS:
                due.append(attempt)
        return due

    def of_tensors(self, target: Target, plans: Mapping[str, PlanColumns]) -> pa.Table | None:
        """Return rows of `tensors` for the plans that are new in the attempt of `target`, or None if no plan is new.

        The ranks of a launch usually share plans, so most calls return None.
        """
        tables = []
        for plan_id, plan in plans.items():
            known = (target.registration.run, target.attempt, plan_id)
            if known not in self._known_plans:
                self._known_plans.add(known)
                # An arrival number for each tensor keeps the order of the plan, which is that of the model.
                tables.append(plan.dimension_rows(lambda: self._tensor_columns(target)))
        return pa.concat_tables(tables) if tables else None

    def _tensor_columns(self, target: Target) -> dict[str, Any]:
        process = target.registration
        return {"run": process.run, "attempt": target.attempt, "rank": process.rank, **self._stamp().columns()}


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """The records of a dead process that were counted as lost: their last sequence number, and how many they are."""

    last: int
    records: int


class LostRecords:
    """Counts the lost records of all targets of one service."""

    def __init__(
        self,
        metrics: ServiceMetrics,
        meter: Callable[[Target], RunMeter],
        stamp: Callable[[], Stamp],
        given_up: Mapping[str, GivenUp],
    ) -> None:
        """Set the dependencies.

        `meter` returns the progress counters of a target's attempt. `stamp` returns the time and arrival number of a
        new row. `given_up` contains the records that were counted as lost before this service started, by incarnation
        id.
        """
        self._metrics = metrics
        self._meter = meter
        self._stamp = stamp
        self._given_up = dict(given_up)
        self._accounts: dict[str, RunMeter] = {}  # meters that already include the lost records, by incarnation

    def recall(self, target: Target) -> None:
        """Set on a new target how many of its records were counted as lost earlier, and the last seq of these records.

        Records are counted as lost when the service finds their process dead.
        """
        if known := self._given_up.get(target.incarnation):
            target.given_up = known.last
            target.records_lost += known.records
            meter = self._meter(target)
            if meter is not self._accounts.get(target.incarnation):
                meter.records_lost += known.records

    def forget(self, target: Target) -> None:
        """Remove a target, but keep the number of its lost records.

        The number is kept because the process of the target may become reachable again after hours.
        """
        if target.given_up > target.cursor:
            self._given_up[target.incarnation] = GivenUp(last=target.given_up, records=target.given_up - target.cursor)
            self._accounts[target.incarnation] = self._meter(target)
        else:
            self._given_up.pop(target.incarnation, None)

    def of_body(self, target: Target, body: ValidBody, events: Iterable[Row]) -> list[Row]:
        """Return rows of `events` for missing records and for lost records that have arrived.

        Missing records are those that `body` skips: their sequence numbers are above that of the last record received
        from `target` earlier and below that of the last record of `body`. Records that the rank itself reports as lost
        in its `events` are counted, too: the rank has not published them, so no sequence number is missing.
        """
        if reported := int(sum(row["value"] or 0 for row in events if row["type"] == EventType.GAP)):
            self._add(target, reported)
            self._metrics.lost(target.registration.run, reported)
        reason = "neither the spool nor a store has them" if target.is_dead else "the ring had overwritten them"
        rows = [self._lost(target, first, last, reason) for first, last in body.missing]
        if target.given_up > target.cursor:
            rows.append(self._found(target, target.cursor + 1, min(body.last, target.given_up)))
        return rows

    def of_unread(self, target: Target, reason: str) -> list[Row]:
        """Return a list with a row of `events` that reports as lost the unpolled records of a dead process.

        Records that the process had not published at its latest sign of life count, too. The list is empty if the
        service has polled all of them.
        """
        first, last = max(target.cursor, target.given_up) + 1, max(target.head, target.expected)
        if last < first:
            return []
        target.given_up = last
        # Without a seq: the watermark must remain below these records, in case they arrive later.
        return [self._lost(target, first, last, reason) | {"seq": None}]

    def _lost(self, target: Target, first: int, last: int, reason: str) -> Row:
        records = last - first + 1
        self._add(target, records)
        self._metrics.lost(target.registration.run, records)
        log.warning("%d records lost: %s", records, reason, extra={"target": target.name, "first": first, "last": last})
        return gap_row(target, first, last, reason, self._stamp())

    def _found(self, target: Target, first: int, last: int) -> Row:
        records = last - first + 1
        self._add(target, -records)
        log.info("%d records that were counted as lost have arrived", records, extra={"target": target.name})
        return found_row(target, first, last, self._stamp())

    def _add(self, target: Target, records: int) -> None:
        target.records_lost += records
        self._meter(target).records_lost += records
