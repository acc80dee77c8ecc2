"""Find stalled attempts, the rank that blocks the others, and the place in the code at which each rank waits.

An attempt is stalled when its state is `stalled`, or when a rank reports that its training hangs. If a rank detects a
hang, or if the service requests it, the records of the rank contain stacks, flight records and hang events. A blocking
rank is named only if these reports identify it. `StallTracker` performs no I/O; the caller passes the time.
`request_stacks` requests stacks from ranks concurrently: a rank that does not respond does not delay the others.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rankscope_contract.model.events import EventType, RunState
from rankscope_contract.model.stacks import FlightRecord, StackDump, Standing
from rankscope_ingest.base.errors import FetchError, RegistrationError
from rankscope_ingest.detect.incidents import parse_details
from rankscope_ingest.pipeline.rows import Row
from rankscope_ingest.runs.blame import RankFacts, single_out
from rankscope_ingest.runs.incident import Incident, run_incident
from rankscope_ingest.runs.models import Attempt, AttemptKey, Target
from rankscope_ingest.runs.text import hang_reason, last_reports, wait_places
from rankscope_storage.base.rule_names import RUN_STALLED

WAIT_SECONDS: Final = 10.0
"""Maximum time in seconds for which the notification about a stall waits for the stacks of the ranks.

A rank cannot send stacks while C code holds the lock of the interpreter.
"""

QUIET_SECONDS: Final = 2.0
"""Time in seconds without a further report of a rank that must pass before the notification about a stall is sent.

A report is a stack dump, a flight record or a hang event. The notification waits because ranks with a flight recorder
send the flight record shortly after the stacks. `WAIT_SECONDS` limits the waiting.
"""

_TYPES: Final = frozenset({EventType.HANG, EventType.STACKS, EventType.FLIGHT_RECORD})


@dataclass(slots=True)
class Report:
    """The latest stacks, flight record and hang event of one rank. Times are arrival times in monotonic seconds."""

    at: float  # of the last report
    stacks: StackDump | None = None
    stacks_at: float = 0.0
    flight: FlightRecord | None = None
    flight_at: float = 0.0
    hang: str | None = None  # message of its own hang event, until training continues
    hangs_since: float = 0.0
    refusal: str | None = None  # reason why it sent no stacks on request

    def since(self, start: float) -> Report:
        """Return a copy of the report that contains only current stacks and flight records.

        They are current if they arrived after `start` (the start of the stall), or after the start of the hang of this
        rank if the hang began earlier.
        """
        earliest = min(start, self.hangs_since) if self.hang else start
        stacks = self.stacks if self.stacks_at >= earliest else None
        return replace(self, stacks=stacks, flight=self.flight if self.flight_at >= earliest else None)


@dataclass(slots=True)
class Stall:
    """One stall of an attempt: a period without a step. Times are monotonic seconds."""

    since: float
    opened_at: float
    are_stacks_requested: bool = False
    incident: Incident | None = None  # set when it is reported


@dataclass(slots=True, kw_only=True)
class StallActions:
    """Result of one check for stalled attempts.

    It contains the ranks whose stacks must be requested, the incidents to announce, and the stalls that have ended. A
    stall ends when the attempt makes a step or ends.
    """

    to_request: list[tuple[AttemptKey, tuple[int, ...]]] = field(default_factory=list)
    due: list[Incident] = field(default_factory=list)
    over: list[tuple[Incident, bool]] = field(
        default_factory=list
    )  # the flag: training continued; false: the run ended


class StallTracker:
    """The latest stacks, flight records and hang events of all ranks, and the stalls of all attempts."""

    def __init__(self, open_stalls: Iterable[Incident] = ()) -> None:
        """Create a tracker of stalled attempts.

        `open_stalls` contains the stalls that an earlier service reported and that have not ended.
        """
        self._reports: dict[AttemptKey, dict[int, Report]] = {}
        self._stalls: dict[AttemptKey, Stall] = {
            incident.attempt_key: Stall(incident.opened_at, incident.opened_at, True, incident)
            for incident in open_stalls
        }

    def add(self, key: AttemptKey, rank: int, events: Iterable[Row], now: float) -> None:
        """Add the stacks, flight records and hangs in `events`, those of one poll response of one rank."""
        for row in events:
            if row["type"] in _TYPES:
                report = self._report(key, rank, now)
                report.at = now
                _update(report, row, now)

    def open(self) -> list[Incident]:
        """Return the reported stalls that have not ended."""
        return [stall.incident for stall in self._stalls.values() if stall.incident is not None]

    def add_refusal(self, key: AttemptKey, rank: int, reason: str, now: float) -> None:
        """Record the reason why a rank sent no stacks when the service requested them."""
        self._report(key, rank, now).refusal = reason

    def check(self, attempts: Iterable[Attempt], now: float) -> StallActions:
        """Return what must be done at `now`: request stacks, announce incidents, and report stalls that have ended.

        `attempts` contains all active attempts. The tracker discards its state of all other attempts.
        """
        actions = StallActions()
        known = {attempt.key: attempt for attempt in attempts}
        for key in [key for key in (*self._stalls, *self._reports) if key not in known]:
            self._stalls.pop(key, None)
            self._reports.pop(key, None)
        for attempt in known.values():
            self._forget_replaced_processes(attempt)
            if self._is_stalled(attempt):
                self._follow(attempt, actions, now)
            elif (stall := self._stalls.get(attempt.key)) is not None:
                has_stepped = stall.incident is not None and _has_stepped(attempt, stall.incident)
                # A rank that is interrupted no longer hangs, but training continues only with the next step.
                if stall.incident is None or has_stepped or attempt.has_ended:
                    del self._stalls[attempt.key]
                if stall.incident is not None and (has_stepped or attempt.has_ended):
                    is_cut_off = attempt.state in {RunState.STOPPED, RunState.FAILED}
                    actions.over.append((stall.incident, has_stepped and not is_cut_off))
        return actions

    def _report(self, key: AttemptKey, rank: int, now: float) -> Report:
        return self._reports.setdefault(key, {}).setdefault(rank, Report(now))

    def _forget_replaced_processes(self, attempt: Attempt) -> None:
        """Remove the reports of processes that another process of the same rank has replaced.

        A replaced process has ended and cannot report the end of its hang.
        """
        reports = self._reports.get(attempt.key, {})
        for number in [number for number in reports if number in attempt.ranks]:
            if reports[number].at < attempt.ranks[number].known_since:
                del reports[number]

    def _is_stalled(self, attempt: Attempt) -> bool:
        if attempt.has_ended:
            return False
        reports = self._reports.get(attempt.key, {})
        live = {rank.number for rank in attempt.live_ranks}
        return attempt.state is RunState.STALLED or any(reports[rank].hang for rank in reports.keys() & live)

    def _follow(self, attempt: Attempt, actions: StallActions, now: float) -> None:
        # A rank can report a hang before the service considers the attempt stalled.
        stall = self._stalls.setdefault(attempt.key, Stall(min(attempt.progressed_at, now), now))
        if stall.incident is not None:
            return
        reports = {
            number: report.since(stall.since)
            for number, report in self._reports.get(attempt.key, {}).items()
            if report.at >= stall.since or report.hang  # a rank may hang while others still make steps
        }
        missing = tuple(
            rank.number for rank in attempt.live_ranks if rank.number not in reports or not reports[rank.number].stacks
        )
        if missing and not stall.are_stacks_requested:
            stall.are_stacks_requested = True
            actions.to_request.append((attempt.key, missing))
        last = max((report.at for report in reports.values()), default=stall.opened_at)
        if now - stall.opened_at >= WAIT_SECONDS or (not missing and now - last >= QUIET_SECONDS):
            stall.incident = _incident(attempt, reports, now)
            actions.due.append(stall.incident)


def _has_stepped(attempt: Attempt, stall: Incident) -> bool:
    """Return whether the attempt made a step after the stall was announced.

    The step can have a lower number: training may return to an earlier step.
    """
    is_further = attempt.last_step is not None and attempt.last_step > (stall.last_step or 0)
    return is_further or any(rank.stepped_at > stall.opened_at for rank in attempt.live_ranks)


def _update(report: Report, row: Row, now: float) -> None:
    details = parse_details(row["details"])
    try:
        if row["type"] == EventType.STACKS:
            report.stacks, report.stacks_at, report.refusal = StackDump.of(details), now, None
        elif row["type"] == EventType.FLIGHT_RECORD:
            report.flight, report.flight_at = FlightRecord.of(details), now
        else:
            report.hang = str(row["message"]) if details.get("state") == "began" else None
            report.hangs_since = now
    except ValueError:
        return  # of another release: the event is stored unchanged and is not evaluated


def _incident(attempt: Attempt, reports: Mapping[int, Report], now: float) -> Incident:
    ranks = {rank.number: rank for rank in attempt.live_ranks}
    none = Report(now)
    live = {number: reports.get(number, none) for number in ranks}
    facts = [
        RankFacts(
            rank=number,
            stacks=report.stacks,
            flight=report.flight,
            last_step=ranks[number].last_step,
            hangs=report.hang is not None,
        )
        for number, report in live.items()
    ]
    verdict = single_out(facts, attempt.world_size)
    with_place = {number: report for number, report in live.items() if report.stacks or report.flight}
    is_stalled = attempt.state is RunState.STALLED
    hangs = {number: report.hang for number, report in live.items() if report.hang}
    return run_incident(
        RUN_STALLED,
        attempt,
        rank=verdict.rank,
        reason=(attempt.reason if is_stalled else hang_reason(hangs)) or "no step",
        cause=str(verdict),
        reports=last_reports(attempt, now),
        places=wait_places(
            [Standing.of(number, report.stacks, report.flight) for number, report in with_place.items()],
            {number: report.flight for number, report in with_place.items() if report.flight is not None},
            {
                number: report.refusal or "no response"
                for number, report in sorted(live.items())
                if number not in with_place
            },
        ),
        opened_at=now,
    )


MAX_REQUESTS: Final = 64
"""Maximum number of ranks whose stacks are requested at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswer:
    """Response of one rank to a request for its stacks, or the reason why there is no response."""

    rank: int
    host: str
    pid: int
    document: dict[str, Any] | None = None
    error: str | None = None

    def to_document(self) -> dict[str, Any]:
        """Return the entry of this rank in the JSON response to POST /api/v1/stacks."""
        process = {"rank": self.rank, "host": self.host, "pid": self.pid}
        return process | ({"error": self.error} if self.document is None else self.document)


def parse_stacks_request(body: bytes) -> tuple[str, list[int] | None]:
    """Return the run and the requested ranks of a POST /api/v1/stacks body.

    The ranks are None if the stacks of all ranks are requested. Raises RegistrationError with an example of a valid
    body if `body` is malformed.
    """
    try:
        document = json.loads(body)
        run, ranks = document["run"], document.get("ranks")
        good = isinstance(run, str) and (ranks is None or all(type(rank) is int for rank in ranks))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        good = False
    if not good:
        raise RegistrationError(
            400,
            'send a JSON object such as {"run": "…", "ranks": [0, 1]}; without "ranks", all ranks are asked for stacks',
        )
    return run, ranks


async def request_stacks(
    fetch: Callable[[str], Awaitable[dict[str, Any]]],
    targets: Iterable[Target],
    key: AttemptKey,
    ranks: Collection[int] | None,
) -> list[RankAnswer]:
    """Request the stacks of the live ranks of an attempt concurrently; return the responses in the order of the ranks.

    `ranks` are the ranks from which stacks are requested; None means all live ranks. `fetch` sends POST /stacks to the
    URL of a rank and returns the response. If `fetch` raises FetchError, the error becomes the result of the rank.
    """
    limit = asyncio.Semaphore(MAX_REQUESTS)

    async def request(target: Target) -> RankAnswer:
        process = target.registration
        document = error = None
        try:
            async with limit:
                document = await fetch(process.url)
        except FetchError as failure:
            error = _NO_RESPONSE if failure.reason == "timeout" else str(failure)
        return RankAnswer(rank=process.rank, host=process.host, pid=process.pid, document=document, error=error)

    live = [one for one in targets if one.attempt_key == key and not one.is_gone and not one.is_dead]
    chosen = [target for target in live if ranks is None or target.registration.rank in ranks]
    return sorted(await asyncio.gather(*map(request, chosen)), key=lambda answer: answer.rank)


_NO_RESPONSE: Final = "no response: C code may hold its interpreter (docs/hangs.md describes how to look at it)"
