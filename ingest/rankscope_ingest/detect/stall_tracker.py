"""Attempts that stand still: which rank holds up the others, if reports single one out, and where all of them stand.

An attempt stands still when it is judged stalled, or when a rank reports that its training hangs. The reports come as
events of the ranks' records, by themselves or because the service asked for them. Pure, the clock is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.diagnostics.blame import RankFacts, single_out
from rankscope_contract.diagnostics.collective_calls import sentences, sites_of
from rankscope_contract.diagnostics.rank_groups import Standing, grouped, ranks_text
from rankscope_contract.diagnostics.stacks import FlightRecord, StackDump
from rankscope_contract.model.events import EventType, RunState
from rankscope_ingest.detect.symptoms import parse_details
from rankscope_ingest.notify.incident import Incident
from rankscope_ingest.notify.text import run_stalled
from rankscope_ingest.runs.models import Attempt, AttemptKey
from rankscope_ingest.runs.root_cause import last_reports

WAIT_SECONDS: Final = 10.0
"""How long a message waits for ranks that have not said where they stand: C code may hold a rank's interpreter."""

QUIET_SECONDS: Final = 2.0
"""A flight record comes a moment after the stacks, from ranks that keep one."""

_TYPES: Final = pa.array([EventType.HANG, EventType.STACKS, EventType.FLIGHT_RECORD])


MOST_PLACES: Final = 12
"""Places of ranks in a message, the ones that others may wait for first, and reasons why ranks gave no stacks."""


@dataclass(slots=True)
class Report:
    """The latest reports of one rank on where it stands. Times are those of their arrival."""

    at: float  # of the last one
    stacks: StackDump | None = None
    stacks_at: float = 0.0
    flight: FlightRecord | None = None
    flight_at: float = 0.0
    hangs: str | None = None  # the message of its own hang event, until training goes on
    hangs_since: float = 0.0
    refusal: str | None = None  # why it gave no stacks when it was asked

    def since(self, moment: float) -> Report:
        """Return the report without stacks and flight record from before `moment`, or before the rank's own hang."""
        earliest = min(moment, self.hangs_since) if self.hangs else moment
        stacks = self.stacks if self.stacks_at >= earliest else None
        return replace(self, stacks=stacks, flight=self.flight if self.flight_at >= earliest else None)


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


class StallTracker:
    """Knows the reports of all ranks and the stalls of all attempts. `told` are those of a former service."""

    def __init__(self, told: Iterable[Incident] = ()) -> None:
        self._reports: dict[AttemptKey, dict[int, Report]] = {}
        self._stalls: dict[AttemptKey, Stall] = {}
        for incident in told:
            self._stalls[incident.attempt_key] = Stall(incident.opened_at, incident.opened_at, True, incident)

    def heard(self, key: AttemptKey, rank: int, events: pa.Table | None, now: float) -> None:
        """Take the events of one body, all of one rank, that tell where it stands."""
        if events is None:
            return
        for row in events.filter(pc.is_in(events["type"], _TYPES)).select(["type", "message", "details"]).to_pylist():
            report = self._reports.setdefault(key, {}).setdefault(rank, Report(now))
            report.at = now
            _note(report, row, now)

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
        """Return the reports of this standstill; a rank may hang while others still make steps."""
        known = self._reports.get(key, {}).items()
        return {number: report.since(since) for number, report in known if report.at >= since or report.hangs}


def _went_on(attempt: Attempt, told: Incident) -> bool:
    """Return whether steps followed; an attempt may have ended since, and one that failed never went on."""
    further = attempt.last_step is not None and attempt.last_step > (told.last_step or 0)
    return further or not attempt.has_ended


def _note(report: Report, row: Mapping[str, Any], now: float) -> None:
    details = parse_details(row["details"])
    try:
        if row["type"] == EventType.STACKS:
            report.stacks, report.stacks_at, report.refusal = StackDump.of(details), now, None
        elif row["type"] == EventType.FLIGHT_RECORD:
            report.flight, report.flight_at = FlightRecord.of(details), now
        else:
            report.hangs = str(row["message"]) if details.get("state") == "began" else None
            report.hangs_since = now
    except ValueError:
        return  # of a rank of another release: its event is stored as it came, and is no evidence


def _incident(attempt: Attempt, reports: Mapping[int, Report], now: float) -> Incident:
    live = {rank.number: rank for rank in attempt.live_ranks}
    reports = {number: report for number, report in reports.items() if number in live}
    facts = [_facts(number, rank.last_step, reports.get(number)) for number, rank in live.items()]
    verdict = single_out(facts, attempt.world_size)
    return run_stalled(
        run=attempt.run,
        attempt=attempt.number,
        rank=verdict.rank,
        step=attempt.last_step,
        reason=(attempt.reason if attempt.state is RunState.STALLED else _hung(reports)) or "no step",
        cause=str(verdict),
        reports=() if verdict.rank is not None else last_reports(attempt, now),
        lines=_places(sorted(live), reports),
        opened_at=now,
    )


def _facts(number: int, last_step: int | None, report: Report | None) -> RankFacts:
    if report is None:
        return RankFacts(rank=number, last_step=last_step)
    return RankFacts(
        rank=number,
        stacks=report.stacks,
        flight=report.flight,
        last_step=last_step,
        hangs=report.hangs is not None,
    )


def _hung(reports: Mapping[int, Report]) -> str | None:
    """Return the ranks that reported a hang of their own, equal messages together."""
    found: dict[str, list[int]] = {}
    for number, report in sorted(reports.items()):
        if report.hangs:
            found.setdefault(report.hangs, []).append(number)
    return "; ".join(_bounded([f"{ranks_text(numbers)}: {message}" for message, numbers in found.items()])) or None


def _places(live: Iterable[int], reports: Mapping[int, Report]) -> tuple[str, ...]:
    """Return the collectives that ranks wait in, where ranks stand, and which ranks gave no stacks, and why."""
    told = {number: report for number, report in reports.items() if report.stacks or report.flight}
    standings = [Standing.of(number, report.stacks, report.flight) for number, report in told.items()]
    flights = {number: report.flight for number, report in told.items() if report.flight is not None}
    refusals: dict[str, list[int]] = {}
    for number in live:
        if number not in told:
            refusal = reports[number].refusal if number in reports else None
            refusals.setdefault(refusal or "no answer", []).append(number)
    return (
        *sentences(flights, sites_of(standings)),
        *_bounded([str(group) for group in grouped(standings)]),
        *_bounded([f"{ranks_text(numbers)} gave no stacks: {why}" for why, numbers in refusals.items()]),
    )


def _bounded(lines: list[str]) -> list[str]:
    left = len(lines) - MOST_PLACES
    return [*lines[:MOST_PLACES], f"and {left:,} more"] if left > 0 else lines
