"""Rows the service itself adds to the store: launches, gaps, incidents, and versions of runs and attempts. Pure.

Their `ts_origin` is "ingest". A gap in a body stands at the last lost seq, so that it is dropped together with the
records around it when they are stored already; other rows carry no seq, and a repeated version of a run is harmless.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.model.events import EventType, Severity
from rankscope_contract.protocol.channel import Registration
from rankscope_ingest.base.tables import FROM_INGEST, rows_table
from rankscope_ingest.notify.incident import Incident, headline
from rankscope_ingest.record_channel.plans import PlanColumns
from rankscope_ingest.runs.target import Target
from rankscope_ingest.runs.tracker import ENDED, Attempt, AttemptKey

LIVE: Final = "live"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stamp:
    """When a row was made: wall clock in UTC µs, and its place in the order of arrival."""

    ts: int
    ordinal: int

    def columns(self) -> Row:
        """Return the columns that say when."""
        return {"ts": self.ts, "ordinal": self.ordinal, "ts_origin": FROM_INGEST}


def launch_row(target: Target, stamp: Stamp) -> Row:
    """Return the event of a process that registered."""
    who = target.registration
    details = {
        "launch_id": who.launch_id,
        "host": who.host,
        "pid": who.pid,
        "world_size": who.world_size,
        "versions": who.versions,
    }
    message = f"rank {who.rank} of {who.world_size} registered from {who.host}, process {who.pid}"
    return _rank_columns(who, target.attempt) | {
        **stamp.columns(),
        "type": EventType.LAUNCH,
        "severity": Severity.INFO,
        "message": message,
        "details": _json(details),
    }


def gap_row(target: Target, first: int, last: int, why: str, stamp: Stamp) -> Row:
    """Return the event of records `first` to `last` that can no longer be had."""
    count = last - first + 1
    details = {"first": first, "last": last, "records": count, "reason": why}
    return _rank_columns(target.registration, target.attempt) | {
        **stamp.columns(),
        "seq": last,
        "type": EventType.GAP,
        "severity": Severity.WARNING,
        "value": float(count),
        "message": f"{count} records lost (seq {first} to {last}): {why}",
        "details": _json(details),
    }


def found_row(target: Target, first: int, last: int, stamp: Stamp) -> Row:
    """Return the event that takes a gap back: its count is negative, so that sums over gaps stay right."""
    count = last - first + 1
    details = {"first": first, "last": last, "records": -count, "reason": "the process was only out of reach"}
    return _rank_columns(target.registration, target.attempt) | {
        **stamp.columns(),
        "type": EventType.GAP,
        "severity": Severity.INFO,
        "value": float(-count),
        "message": f"{count} records taken for lost (seq {first} to {last}) arrived after all",
        "details": _json(details),
    }


def incident_row(incident: Incident, state: str, stamp: Stamp) -> Row:
    """Return the event that an incident reached `state`: opened, notified, undelivered, muted or resolved.

    Its rank is null where the incident singles out none.
    """
    first = incident.first
    details = {
        "key": incident.key,
        "state": state,
        "events": incident.events,
        "ranks": sorted(incident.ranks),
        "last_step": incident.last_step,
        **({"cause": incident.cause} if incident.cause else {}),
        **({"reports": incident.reports} if incident.reports else {}),
        **({"where": incident.lines} if incident.lines else {}),
    }
    return {
        **stamp.columns(),
        "run": first.run,
        "attempt": first.attempt,
        "rank": first.rank,
        "step": first.step,
        "type": EventType.INCIDENT,
        "severity": incident.severity,
        "message": headline(first),
        "details": _json(details),
        **{name: getattr(first, name) for name in ("rule", "kind", "tensor", "op", "value", "baseline", "threshold")},
    }


def run_row(attempt: Attempt, started_at: int, stamp: Stamp) -> Row:
    """Return the version of a run after its latest attempt; `started_at` is that of the first."""
    return _state_columns(attempt, stamp) | {"started_at": started_at}


def attempt_row(attempt: Attempt, stamp: Stamp) -> Row:
    """Return the version of an attempt."""
    return _state_columns(attempt, stamp) | {"started_at": attempt.started_at, "launch_id": attempt.launch_id}


def _state_columns(attempt: Attempt, stamp: Stamp) -> Row:
    return {
        **stamp.columns(),
        "run": attempt.run,
        "attempt": attempt.number,
        "state": attempt.state,
        "ended_at": attempt.ended_at if attempt.state in ENDED else None,
        "planned_steps": attempt.planned_steps,
        "last_step": attempt.last_step,
        "world_size": attempt.world_size,
        "source_kind": LIVE,
        "config": _json(attempt.config) if attempt.config else None,
        "reason": attempt.reason,
    }


def _rank_columns(who: Registration, attempt: int) -> Row:
    return {"run": who.run, "attempt": attempt, "rank": who.rank, "incarnation": who.incarnation}


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


REFRESH_MICROSECONDS: Final = 60_000_000
"""A run that goes on gets a new version this often, so that its last step is about right after a crash."""


class Versions:
    """Knows what was written last. `stamp` gives a moment and a place in the order of arrival."""

    def __init__(self, stamp: Callable[[], Stamp], run_starts: Mapping[str, int]) -> None:
        self._stamp = stamp
        self._run_starts = dict(run_starts)
        self._written_at: dict[AttemptKey, int] = {}
        self._known_plans: set[tuple[str, int, str]] = set()

    def of_attempt(self, attempt: Attempt, *, is_latest: bool) -> dict[str, pa.Table]:
        """Return a version of the attempt, and of its run when that is the run's latest."""
        stamp = self._stamp()
        self._written_at[attempt.key] = stamp.ts
        start = self._run_starts.setdefault(attempt.run, attempt.started_at)
        tables = {"attempts": rows_table("attempts", [attempt_row(attempt, stamp)])}
        if is_latest:
            tables["runs"] = rows_table("runs", [run_row(attempt, start, stamp)])
        return tables

    def due(self, attempts: Iterable[Attempt], wall: int) -> list[Attempt]:
        """Return the attempts that go on and were last written long ago."""
        return [
            attempt
            for attempt in attempts
            if attempt.state not in ENDED
            and wall - self._written_at.setdefault(attempt.key, wall) >= REFRESH_MICROSECONDS
        ]

    def of_tensors(self, target: Target, plans: Mapping[str, PlanColumns]) -> pa.Table | None:
        """Return the tensors of plans that are new in this attempt; the ranks of a launch mostly share theirs."""
        tables = []
        for plan_id, plan in plans.items():
            known = (target.registration.run, target.attempt, plan_id)
            if known not in self._known_plans:
                self._known_plans.add(known)
                # A place in the order of arrival for each: the plan has the order of the model, and of its calls.
                tables.append(plan.dimension_rows(lambda: self._tensor_columns(target)))
        return pa.concat_tables(tables) if tables else None

    def _tensor_columns(self, target: Target) -> dict[str, Any]:
        who, stamp = target.registration, self._stamp()
        place = {"run": who.run, "attempt": target.attempt, "rank": who.rank}
        return place | {"ts": stamp.ts, "ordinal": stamp.ordinal, "ts_origin": FROM_INGEST}
