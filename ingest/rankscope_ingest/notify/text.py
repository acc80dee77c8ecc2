"""The words of a notification. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rankscope_contract.diagnostics.rank_groups import ranks_text
from rankscope_contract.model.events import Severity
from rankscope_ingest.notify.incident import Incident, Symptom, headline
from rankscope_ingest.notify.notifiers.base import Message
from rankscope_ingest.runs.models import AttemptKey

RUN_FAILED: Final = "RunFailed"
"""Rule name of the incident that a run failed; no rule on a rank has it."""

RUN_STALLED: Final = "RunStalled"
"""Rule name of the incident that a run stands still."""

AGAIN: Final = "(Sent again: the service was stopped before this delivery could be confirmed.)"
MUTE_FOLLOWS: Final = "(Many incidents in this run: further ones are stored but not sent for up to an hour.)"


def message(incident: Incident, *, again: bool = False) -> Message:
    """Return what to tell people about `incident`: what, where, how bad, and how to look closer."""
    first = incident.first
    lines = [
        f"run: {first.run} (attempt {first.attempt})",
        f"rank: {first.who.removeprefix('rank ')}",
        *_line("step", first.step),
        *_line("tensor", first.tensor),
        *_line("kind", first.kind),
        *_line("statistic", first.op),
        *_line("value", first.value),
        *_line("baseline", first.baseline),
        *_line("threshold", first.threshold),
        *_line("said", first.message),
        *_line("cause", incident.cause),
        *_section("last reports", incident.reports),
        *_section("where", incident.lines),
    ]
    if first.rule == RUN_STALLED:
        lines.append(f"look closer: rankscope stacks {first.run}")
    elif first.rule == RUN_FAILED:
        lines.append(f"look closer: rankscope summary {first.run}")
    else:
        where = f" on {ranks_text(sorted(incident.ranks))}" if incident.ranks else ""
        lines.append(f"so far: {incident.events} anomaly events{where}")
        lines.append(f"look closer: rankscope anomalies {first.run}")
    lines.append(f"incident: {incident.key}")
    lines += [AGAIN] if again else []
    lines += [MUTE_FOLLOWS] if incident.is_last_before_mute else []
    return Message(
        key=incident.key,
        title=f"[{incident.severity}] {first.run}: {headline(first)}",
        body="\n".join(lines),
        severity=incident.severity,
    )


def run_failed(
    *,
    run: str,
    attempt: int,
    rank: int | None,
    step: int | None,
    reason: str,
    cause: str,
    reports: tuple[str, ...],
    opened_at: float,
) -> Incident:
    """Return the incident that an attempt failed; its key does not depend on when or how that was found.

    `rank` is the one that failed first, None where it is unknown; `cause` is the evidence for either.
    """
    first = _of_a_run(RUN_FAILED, (run, attempt), rank, step, reason)
    incident = _settled(first, failure_key(run, attempt), opened_at)
    incident.cause, incident.reports = cause, reports
    return incident


def goes_on(incident: Incident) -> Message:
    """Return what to tell people when a run that stood still makes steps again."""
    first = incident.first
    where = "" if first.step is None else f" It had stood still after step {first.step}."
    return Message(
        key=f"{incident.key}:resolved",
        title=f"[resolved] {first.run}: {RUN_STALLED}, steps go on",
        body=f"run: {first.run} (attempt {first.attempt})\nTraining goes on.{where}\nincident: {incident.key}",
        severity=Severity.INFO,
    )


def run_stalled(
    *,
    run: str,
    attempt: int,
    rank: int | None,
    step: int | None,
    reason: str,
    cause: str,
    reports: tuple[str, ...],
    lines: tuple[str, ...],
    opened_at: float,
) -> Incident:
    """Return the incident that an attempt stands still.

    `rank` is the one that the others wait for, None where it is unknown; `cause` is the evidence for either.
    """
    first = _of_a_run(RUN_STALLED, (run, attempt), rank, step, reason)
    incident = _settled(first, f"{RUN_STALLED}:{attempt}:{step}:{run}", opened_at)
    incident.cause, incident.reports, incident.lines = cause, reports, lines
    return incident


def _of_a_run(rule: str, key: AttemptKey, rank: int | None, step: int | None, reason: str) -> Symptom:
    run, attempt = key
    return Symptom(
        run=run,
        attempt=attempt,
        rank=rank,
        step=step,
        severity=Severity.CRITICAL,
        causal=(),
        rule=rule,
        message=reason,
    )


def _settled(first: Symptom, key: str, opened_at: float) -> Incident:
    """Return an incident that is complete from the start."""
    return Incident(
        first=first,
        severity=first.severity,
        opened_at=opened_at,
        last_step=first.step,
        events=1,
        ranks=set() if first.rank is None else {first.rank},
        is_settled=True,
        fixed_key=key,
    )


def failure_key(run: str, attempt: int) -> str:
    """Return what identifies the failure of an attempt."""
    return f"{RUN_FAILED}:{attempt}:{run}"


def _section(label: str, lines: Iterable[str]) -> list[str]:
    indented = [f"  {line}" for line in lines]
    return [f"{label}:", *indented] if indented else []


def _line(label: str, value: object) -> list[str]:
    return (
        []
        if value is None or value == ""
        else [f"{label}: {value:g}" if isinstance(value, float) else f"{label}: {value}"]
    )
