"""Attempts that stand still: which ranks wait where, told once when enough of them have said so, and once at its end.

An attempt stands still when it is judged stalled, or when a rank says that its training hangs. What the ranks say comes
as events of their records, by themselves or because the service asked them. Pure, the clock is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.collective_calls import sentences, sites_of
from rankscope_contract.events import EventType, RunState
from rankscope_contract.stacks import FlightRecord, StackDump
from rankscope_contract.standing import Standing, grouped
from rankscope_ingest.alerting.details import parse_details
from rankscope_ingest.alerting.incidents import Incident
from rankscope_ingest.alerting.messages import run_stalled
from rankscope_ingest.lifecycle.lives import Attempt, AttemptKey

WAIT_SECONDS: Final = 10.0
"""How long a message waits for ranks that have not said where they stand: C code may hold a rank's interpreter."""

QUIET_SECONDS: Final = 2.0
"""A flight record comes a moment after the stacks, from ranks that keep one."""

_TYPES: Final = pa.array([EventType.HANG, EventType.STACKS, EventType.FLIGHT_RECORD])


@dataclass(slots=True)
class Report:
    """What one rank has said of where it stands, the latest of each."""

    at: float  # when the last of it arrived
    stacks: StackDump | None = None
    flight: FlightRecord | None = None
    hangs: str | None = None  # its own words, while it gives no sign of training
    refusal: str | None = None  # why it gave no stacks when it was asked


@dataclass(slots=True)
class Stall:
    """One time that an attempt stands still."""

    since: float
    opened_at: float
    is_asked: bool = False
    told: Incident | None = None


@dataclass(slots=True, kw_only=True)
class StallNews:
    """What one look brought: ranks to ask, messages to send, and what is over."""

    to_ask: list[tuple[AttemptKey, tuple[int, ...]]] = field(default_factory=list)
    due: list[Incident] = field(default_factory=list)
    over: list[tuple[Incident, bool]] = field(default_factory=list)  # and whether steps followed


class StallBook:
    """Knows the reports of all ranks and the stalls of all attempts. `told` are those of a former service."""

    def __init__(self, told: Iterable[Incident] = ()) -> None:
        self._reports: dict[AttemptKey, dict[int, Report]] = {}
        self._stalls: dict[AttemptKey, Stall] = {}
        for incident in told:
            self._stalls[incident.attempt_key] = Stall(incident.opened_at, incident.opened_at, True, incident)

    def heard(self, key: AttemptKey, rank: int, events: pa.Table | None, now: float) -> None:
        """Take what the events of one body, all of one rank, say of where it stands."""
        if events is None:
            return
        for row in events.filter(pc.is_in(events["type"], _TYPES)).select(["type", "message", "details"]).to_pylist():
            report = self._reports.setdefault(key, {}).setdefault(rank, Report(now))
            report.at = now
            _note(report, row)

    def refused(self, key: AttemptKey, rank: int, why: str, now: float) -> None:
        """Note that a rank that was asked gave no stacks."""
        self._reports.setdefault(key, {}).setdefault(rank, Report(now)).refusal = why

    def look(self, attempts: Iterable[Attempt], now: float) -> StallNews:
        """Return what is to be done at this moment."""
        news = StallNews()
        known = {attempt.key: attempt for attempt in attempts}
        for key in [key for key in (*self._stalls, *self._reports) if key not in known]:
            self._stalls.pop(key, None)
            self._reports.pop(key, None)
        for attempt in known.values():
            self._forget_former_processes(attempt)
            if self._stands_still(attempt):
                self._follow(attempt, news, now)
            elif (stall := self._stalls.pop(attempt.key, None)) and stall.told is not None:
                news.over.append((stall.told, _went_on(attempt, stall.told)))
        return news

    def _forget_former_processes(self, attempt: Attempt) -> None:
        """Drop what a process said whose place another one has taken: it cannot take back that it hangs."""
        reports = self._reports.get(attempt.key, {})
        for number in [number for number in reports if number in attempt.ranks]:
            if reports[number].at < attempt.ranks[number].known_since:
                del reports[number]

    def _stands_still(self, attempt: Attempt) -> bool:
        if attempt.has_ended:
            return False
        reports = self._reports.get(attempt.key, {})
        live = {rank.number for rank in attempt.live_ranks}
        return attempt.state is RunState.STALLED or any(reports[rank].hangs for rank in reports.keys() & live)

    def _follow(self, attempt: Attempt, news: StallNews, now: float) -> None:
        stall = self._stalls.get(attempt.key)
        if stall is None:
            # What ranks say of themselves when they hang comes before the service takes the attempt for stalled.
            since = min(attempt.progressed_at, now)
            stall = self._stalls[attempt.key] = Stall(since, now)
        if stall.told is not None:
            return
        reports = self._reports_since(attempt.key, stall.since)
        missing = tuple(
            rank.number for rank in attempt.live_ranks if rank.number not in reports or not reports[rank.number].stacks
        )
        if missing and not stall.is_asked:
            stall.is_asked = True
            news.to_ask.append((attempt.key, missing))
        last = max((report.at for report in reports.values()), default=stall.opened_at)
        if now - stall.opened_at >= WAIT_SECONDS or (not missing and now - last >= QUIET_SECONDS):
            stall.told = _incident(attempt, reports, now)
            news.due.append(stall.told)

    def _reports_since(self, key: AttemptKey, since: float) -> dict[int, Report]:
        """Return what was said of this standstill; a rank that hangs may do so while others still make steps."""
        known = self._reports.get(key, {}).items()
        return {number: report for number, report in known if report.at >= since or report.hangs}


def _went_on(attempt: Attempt, told: Incident) -> bool:
    """Return whether steps followed; an attempt may have ended since, and one that failed never went on."""
    further = attempt.last_step is not None and attempt.last_step > (told.last_step or 0)
    return further or not attempt.has_ended


def _note(report: Report, row: Mapping[str, Any]) -> None:
    details = parse_details(row["details"])
    try:
        if row["type"] == EventType.STACKS:
            report.stacks, report.refusal = StackDump.of(details), None
        elif row["type"] == EventType.FLIGHT_RECORD:
            report.flight = FlightRecord.of(details)
        else:
            report.hangs = str(row["message"]) if details.get("state") == "began" else None
    except ValueError:
        return  # of a rank that speaks otherwise: its event is stored as it came, and says nothing here


def _incident(attempt: Attempt, reports: Mapping[int, Report], now: float) -> Incident:
    told = {number: report for number, report in reports.items() if report.stacks or report.flight}
    standings = [Standing.of(number, report.stacks, report.flight) for number, report in told.items()]
    flights = {number: report.flight for number, report in told.items() if report.flight is not None}
    groups = grouped(standings)
    lines = [*sentences(flights, sites_of(standings)), *map(str, groups)]
    for rank in sorted(attempt.live_ranks, key=lambda rank: rank.number):
        if rank.number not in told:
            refusal = reports[rank.number].refusal if rank.number in reports else None
            lines.append(f"rank {rank.number} gave no stacks: {refusal or 'it did not answer'}")
    hung = next((f"rank {number}: {report.hangs}" for number, report in sorted(reports.items()) if report.hangs), None)
    reason = attempt.reason if attempt.state is RunState.STALLED else hung
    return run_stalled(
        run=attempt.run,
        attempt=attempt.number,
        rank=groups[0].ranks[0] if groups else min(attempt.ranks, default=0),
        step=attempt.last_step,
        reason=reason or "no step",
        lines=tuple(lines),
        opened_at=now,
    )
