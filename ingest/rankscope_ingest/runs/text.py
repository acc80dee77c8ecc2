"""All texts for users about runs and incidents.

These texts are the reasons of run states, the evidence for the first failed rank, the last reports of ranks, and
notifications.
"""

from __future__ import annotations

import bisect
import datetime as dt
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rankscope_contract.model.events import RULES_OF_MACHINES, subject_name
from rankscope_contract.model.redaction import redacted_text
from rankscope_contract.model.stacks import FlightRecord, Standing
from rankscope_ingest.runs.collective_calls import grouped, ranks_text, sentences, sites_of
from rankscope_ingest.runs.incident import Incident, Symptom
from rankscope_ingest.runs.models import CLOCKS_DIFFER_MICROSECONDS, Attempt, Cause, EndKind, Rank
from rankscope_storage.base.escaping import path_segment
from rankscope_storage.base.location import Location
from rankscope_storage.base.rule_names import (
    LOG_UNREADABLE,
    RULES_OF_RUNS,
    RUN_FAILED,
    RUN_SLOW,
    RUN_STALLED,
    WITH_SENTENCE,
)
from rankscope_view.data.deviation import deviation_text
from rankscope_view.pages.format import duration

MAX_GROUPS: Final = 3
"""Maximum number of groups of ranks in the reason for the state of a run.

Without this limit, 1,000 ranks that ended in different ways would give 1,000 entries.
"""

MAX_LINES: Final = 12
"""Maximum number of lines in one section of a notification. The ranks that may block other ranks are listed first."""

_AGES: Final = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 21_600.0, 86_400.0)
"""Limits, in seconds, of the classes into which the ages of rank reports are grouped.

Ranks are polled at different times, so the ages of their last reports differ slightly. Ranks whose reports are in the
same class share a line of the text.
"""

_NON_FINITE_COUNTS: Final = {"nans": "NaN", "infs": "infinite"}
_LONGEST_REASON: Final = 120
"""Number of characters of an exception in the title of a notification."""

_SILENT: Final = "stopped responding without an exit report"
_UNSEEN: Final = "did not respond after the service restarted (ended or killed while it was down)"
NO_SUCCESS: Final = "ended without reporting success"
SENT_AGAIN: Final = "(Sent again: the service stopped before it could confirm the delivery.)"
LISTED: Final = "(This run has many incidents of this severity: for up to an hour, they are listed once a minute.)"
MAX_LISTED: Final = 50


# Reasons of states.


def failure_reason(cause: Cause) -> str:
    """Return the reason of state `failed`: the ranks that may have failed first, with their errors."""
    ranks = [end.rank for end in cause.ends]
    if cause.kind is EndKind.VANISHED:
        parts = []
        for never_answered, suffix in ((False, _SILENT), (True, _UNSEEN)):
            if chosen := [rank for rank in ranks if rank.never_answered is never_answered]:
                parts.append(f"{_listing(chosen, '{ranks} on {text}', lambda rank: rank.host)} {suffix}")
        text = "; ".join(parts)
    else:
        text = exit_reports(ranks, "ended by a signal" if cause.kind is EndKind.SIGNALLED else "exception")
    is_open = cause.culprit is None and cause.kind is not EndKind.SIGNALLED
    return f"{text}; which rank failed first is unknown" if is_open else text


def failure_evidence(cause: Cause) -> str:
    """Return a text with the evidence for the rank that failed first, or the reason why that rank is unknown."""
    names = ranks_text([end.rank.number for end in cause.ends])
    if cause.culprit is not None:
        return f"{names}: first rank to " + {
            EndKind.RAISED: "raise an exception other than a lost connection",
            EndKind.VANISHED: "stop responding without an exit report",
        }.get(cause.kind, "be ended by a signal")
    match cause.kind:
        case EndKind.LOST_PEER:
            return f"unknown: {names} lost the connection to a peer, and no earlier failure is known"
        case EndKind.VANISHED if len(cause.ends) == 1:
            return f"unknown: {names} stopped responding, and {cause.unregistered} ranks never registered"
        case EndKind.VANISHED:
            return f"unknown: {names} stopped responding in an unknown order"
        case _:
            return f"unknown: {names} ended within {CLOCKS_DIFFER_MICROSECONDS / 1e6:g} s of each other"


def exit_reports(ranks: Iterable[Rank], default: str = "ended") -> str:
    """Return text such as `ranks 0-1: ValueError: no; rank 3: …`. `default` is the text for ranks without an error."""
    return _listing(ranks, "{ranks}: {text}", lambda rank: rank.error or default, separator="; ")


def short_of_plan(attempt: Attempt) -> str | None:
    """Return a text which states that an attempt completed before its last planned step.

    Return None if the attempt reached the last planned step, or if its last step or the number of planned steps is
    unknown.
    """
    planned, last = attempt.planned_steps, attempt.last_step
    is_short = planned is not None and last is not None and last < planned
    return f"ended at step {last} of {planned} planned" if is_short else None


def stall_reason(attempt: Attempt, idle_seconds: float) -> str:
    """Return the reason of state `stalled`, such as `alive, but no step for 600 s`."""
    if attempt.last_step is not None:
        return f"alive, but no step for {idle_seconds:.0f} s"
    missing = attempt.world_size - len(attempt.ranks)
    absent = f"; {missing} of {attempt.world_size} ranks never registered" if missing > 0 else ""
    return f"alive, but no first step for {idle_seconds:.0f} s{absent}"


def hang_reason(hangs: Mapping[int, str]) -> str | None:
    """Return the hang messages with their ranks, such as `ranks 0-1: …; rank 3: …`, or None if `hangs` is empty.

    Ranks with equal messages are listed together. `hangs` maps each rank that reported a hang to its message.
    """
    groups: dict[str, list[int]] = {}
    for rank, message in sorted(hangs.items()):
        groups.setdefault(message, []).append(rank)
    return "; ".join(_bounded([f"{ranks_text(numbers)}: {message}" for message, numbers in groups.items()])) or None


def divergence_text(groups: Sequence[Sequence[int]], differing: Sequence[int] | None) -> str:
    """Return a sentence that names the ranks on which the replicas of a tensor differ.

    `groups` contains the groups of ranks with equal hashes of the tensor, the largest group first. `differing` contains
    the ranks that differ from the majority; it is None if there is no majority.
    """
    if differing is None:
        return f"{' and '.join(map(ranks_text, groups))} differ from each other, without a majority"
    return f"{ranks_text(differing)} {'differs' if len(differing) == 1 else 'differ'} from {ranks_text(groups[0])}"


def _listing(ranks: Iterable[Rank], form: str, text_of: Callable[[Rank], str], separator: str = ", ") -> str:
    """Return the format string `form`, filled in once for each group of ranks with an equal text and joined.

    `text_of` returns the text of a rank. The groups are in order of their lowest rank; at most MAX_GROUPS are listed.
    """
    groups: dict[str, list[int]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.number):
        groups.setdefault(text_of(rank), []).append(rank.number)
    shown = [form.format(ranks=ranks_text(numbers), text=text) for text, numbers in groups.items()][:MAX_GROUPS]
    left = sum(map(len, list(groups.values())[MAX_GROUPS:]))
    return separator.join(shown) + (f" and {left:,} more ranks" if left else "")


def _bounded(lines: list[str]) -> list[str]:
    left = len(lines) - MAX_LINES
    return [*lines[:MAX_LINES], f"and {left:,} more"] if left > 0 else lines


# Reports of ranks.


def last_reports(attempt: Attempt, now: float) -> tuple[str, ...]:
    """Return the last reports of the ranks as lines such as `ranks 0-3, 5: step 12, 4 s ago`.

    The ranks with the lowest step come first; at the same step, the ranks with the oldest report.
    """
    groups: dict[tuple[int, int, bool, str], list[Rank]] = {}
    for number in sorted(attempt.ranks):
        rank = attempt.ranks[number]
        step = -1 if rank.last_step is None else rank.last_step
        key = step, -bisect.bisect(_AGES, _age(rank, now)), rank.is_restored, _rank_state(rank)
        groups.setdefault(key, []).append(rank)
    lines = [_report(state, ranks, now) for (*_, state), ranks in sorted(groups.items(), key=lambda item: item[0])]
    missing = attempt.world_size - len(attempt.ranks)
    if missing > 0:
        lines.append(f"{missing:,} of {attempt.world_size:,} ranks: never registered")
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"and {len(lines) - MAX_LINES:,} more groups of ranks"]
    return tuple(lines)


def _report(state: str, ranks: list[Rank], now: float) -> str:
    step = "no step" if ranks[0].last_step is None else f"step {ranks[0].last_step}"
    ages = [_age(rank, now) for rank in ranks]
    youngest, oldest = f"{min(ages):.0f}", f"{max(ages):.0f}"
    age = f"{oldest} s ago" if youngest == oldest else f"{youngest}-{oldest} s ago"
    if ranks[0].is_restored:
        age = f"no response since the service started {age}"
    return ", ".join(filter(None, (f"{ranks_text([rank.number for rank in ranks])}: {step}", age, state)))


def _age(rank: Rank, now: float) -> float:
    return max(0.0, now - rank.liveness.last_sign)


def _rank_state(rank: Rank) -> str:
    if rank.exit_reason is not None:
        return f"ended: {rank.exit_reason or 'no reason given'}"
    return "ended" if rank.is_closed else "stopped responding" if rank.is_vanished else ""


def wait_places(
    standings: Iterable[Standing], flights: Mapping[int, FlightRecord], refusals: Mapping[int, str]
) -> tuple[str, ...]:
    """Return lines that show in which collectives and source lines ranks wait, and why some ranks sent no stacks.

    `refusals` maps each rank that sent neither stacks nor a flight record to the reason.
    """
    listed = list(standings)
    reasons: dict[str, list[int]] = {}
    for rank, reason in refusals.items():
        reasons.setdefault(reason, []).append(rank)
    return (
        *sentences(flights, sites_of(listed)),
        *_bounded([str(group) for group in grouped(listed)]),
        *_bounded([f"{ranks_text(ranks)} sent no stacks: {reason}" for reason, ranks in reasons.items()]),
    )


# Notifications.


def headline(first: Symptom) -> str:
    """Return a line that names the rule, kind, tensor, rank and step of `first`, the first anomaly of an incident."""
    name = subject_name(first.tensor, first.op if first.kind is None else None)
    place = " of ".join(part for part in (first.kind, name) if part)
    rule = " in ".join(filter(None, (first.rule or "anomaly", place)))
    return ", ".join([rule, first.ranks_named, *([] if first.step is None else [f"step {first.step}"])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The folder of the store, and the address of the pages, which notifications name; empty if they are unknown."""

    store: str = ""
    url: str = ""

    @classmethod
    def of(cls, store: Location, url: str = "") -> Place:
        """Return the place of the store in the folder `store`."""
        return cls(store=str(store.absolute()), url=url)

    def command(self, name: str, run: str) -> str:
        """Return the subcommand `name` of rankscope for `run` and this store; `stacks` asks the service."""
        option, value = ("--service", self.url) if name == "stacks" else ("--store", self.store)
        return shlex.join(["rankscope", name, run, *([option, value] if value else [])])

    def page(self, incident: Incident) -> str:
        """Return the address of the page of `incident`."""
        return f"{self.url}/runs/{path_segment(incident.first.run)}/incidents/{path_segment(incident.key)}"


NO_PLACE: Final = Place()


def title(incident: Incident, *, open_seconds: float | None = None) -> str:
    """Return the title of the notification of `incident`: rule, place, and the values that are wrong.

    A reminder of an incident that is still open has `open_seconds`, the time since its beginning.
    """
    still = "" if open_seconds is None else f"still open after {duration(open_seconds)}: "
    return f"[{incident.severity}] {incident.first.run}: {still}{summary(incident)}"


def summary(incident: Incident) -> str:
    """Return the headline of `incident`, and the values that are wrong."""
    return ": ".join(filter(None, (headline(incident.first), wrong_values(incident))))


def list_title(incidents: Sequence[Incident]) -> str:
    """Return the title of the notification that lists several incidents of one run and severity."""
    first = incidents[0]
    return f"[{first.severity}] {first.first.run}: {len(incidents)} more incident{'s' * (len(incidents) > 1)}"


def list_body(incidents: Sequence[Incident], *, is_repeated: bool, place: Place) -> str:
    """Return the body of the notification that lists several incidents, with one line for each of MAX_LISTED."""
    run, left = incidents[0].first.run, len(incidents) - MAX_LISTED
    lines = [f"run: {run}", *(f"{summary(one)}" for one in incidents[:MAX_LISTED])]
    lines += [f"and {left:,} more"] * (left > 0) + [f"details: {place.command('incidents', run)}", LISTED]
    return "\n".join(lines + [SENT_AGAIN] * is_repeated)


def wrong_values(incident: Incident, *, is_largest: bool = False) -> str:
    """Return the values, or the error, of an incident, such as `loss 9.7, 8 times its median`; empty if unknown.

    With `is_largest`, the value is the largest one so far, and not the first one.
    """
    first = incident.first
    if first.rule == RUN_FAILED or (first.rule in RULES_OF_RUNS and incident.log):
        reason = (incident.cause if incident.log else first.message) or ""
        return redacted_text(reason.partition("\n")[0].removeprefix(f"{first.ranks_named}: "), _LONGEST_REASON)
    if first.rule in WITH_SENTENCE:
        return (first.message or "").removeprefix(f"{first.ranks_named} ")
    if first.rule in RULES_OF_RUNS or first.value is None or first.op is None:
        return ""
    if first.op in _NON_FINITE_COUNTS:
        return f"{first.value:,.0f} elements are {_NON_FINITE_COUNTS[first.op]}"
    value, extent = (incident.largest, "up to ") if is_largest else (first.value, "")
    return deviation_text(first.op, value, first.baseline, first.rule, extent)


def body(incident: Incident, *, is_repeated: bool = False, place: Place = NO_PLACE) -> str:
    """Return the body of the notification of `incident`.

    It contains run, rank, step, values, evidence, and the command and the page that show details.
    """
    first = incident.first
    values = {
        "run": f"{first.run} (attempt {first.attempt})",
        "rank" if incident.log is None else "log monitor": first.ranks_named.removeprefix("rank "),
        "step": first.step,
        "tensor": subject_name(first.tensor, None),
        "kind": first.kind,
        "statistic": first.op,
        "value": first.value,
        "baseline": first.baseline,
        "threshold": first.threshold,
        "message": first.message,
        "cause": incident.cause,
    }
    lines = [
        f"{label}: {value:g}" if isinstance(value, float) else f"{label}: {value}"
        for label, value in values.items()
        if value not in {None, ""}
    ]
    sections: dict[str, tuple[str, ...]] = {"last reports": incident.reports, "where": incident.places}
    if incident.log is not None:
        sections |= {"last rows": incident.log.rows, "how to read the rows": incident.log.guide}
    for label, section in sections.items():
        lines += [f"{label}:", *(f"  {line}" for line in section)] if section else []
    commands = {RUN_STALLED: "stacks", RUN_FAILED: "summary", **dict.fromkeys(RULES_OF_MACHINES, "events")}
    command = commands.get(first.rule or "", "anomalies")
    command = "summary" if incident.log is not None and first.rule in RULES_OF_RUNS else command
    if command == "anomalies":
        ranks = f" on {ranks_text(sorted(incident.ranks))}" if incident.ranks else ""
        lines.append(f"anomaly events so far: {incident.events}{ranks}")
    lines.append(f"details: {place.command(command, first.run)}")
    lines += [f"page: {place.page(incident)}"] if place.url else []
    lines.append(f"incident: {incident.key}")
    return "\n".join(lines + [SENT_AGAIN] * is_repeated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of an incident: its time in UTC, seconds since the beginning, and whether training continues."""

    has_continued: bool
    at: dt.datetime | None = None  # None if it is unknown
    seconds: float = 0.0


def resolved_title(incident: Incident, ending: Ending) -> str:
    """Return the title of the notification that an incident is over."""
    first = incident.first
    name = first.rule if first.rule in RULES_OF_RUNS else headline(replace(first, step=None))
    return f"[resolved] {first.run}: {name}, {_outcome(incident, ending)}"


def resolved_body(incident: Incident, ending: Ending, *, place: Place = NO_PLACE) -> str:
    """Return the body of the notification that an incident is over."""
    first, outcome = incident.first, _outcome(incident, ending)
    sentences = [f"{outcome[0].upper()}{outcome[1:]}."]
    is_of_run = first.rule in RULES_OF_RUNS
    if is_of_run and first.step is not None:
        before = "the stall" if first.rule == RUN_STALLED else "it"
        sentences.append(f"The last step before {before} was {first.step}.")
    if ending.at is not None:
        after = f", {duration(ending.seconds)} after it was reported" if is_of_run else ""
        sentences.append(f"It ended at {ending.at:%Y-%m-%d %H:%M:%S} UTC{after}.")
    lines = [f"run: {first.run} (attempt {first.attempt})"]
    lines += [] if incident.log is None else [f"log monitor: {incident.log.address}"]
    lines.append(" ".join(sentences))
    lines += [] if ending.has_continued else [f"details: {place.command('summary', first.run)}"]
    return "\n".join([*lines, f"incident: {incident.key}"])


def _outcome(incident: Incident, ending: Ending) -> str:
    first, last = incident.first, incident.last_step
    if first.rule not in RULES_OF_RUNS:
        steps = "" if first.step is None else f", step {first.step}"
        steps = f", steps {first.step} to {last}" if last != first.step else steps
        return f"over after {duration(ending.seconds)}{steps}"
    if first.rule == LOG_UNREADABLE:
        return "the log can be read again"
    if first.rule == RUN_SLOW and ending.has_continued:
        return "the step time is normal again"
    return "training continues" if ending.has_continued else "the run ended"
