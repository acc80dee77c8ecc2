"""Symptoms and incidents, which are the results of detection.

A symptom is the causally first anomaly of one rank at one step. An incident is a group of anomalies with one cause, or
the failure or stall of one attempt. Rows of `events` and notifications are built from both.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rankscope_contract.model.events import Severity
from rankscope_ingest.runs.models import Attempt, AttemptKey
from rankscope_storage.base.rule_names import RUN_FAILED, RUN_STALLED

OPENED: Final = "opened"
NOTIFIED: Final = "notified"
UNDELIVERED: Final = "undelivered"
MUTED: Final = "muted"
RESOLVED: Final = "resolved"

NON_FINITE: Final = "non-finite"
"""Text that replaces the rule name in the subject (rule and tensor) of an anomaly with a NaN or infinite value.

The reason is that NaN and infinite values spread to other tensors.
"""

Subject = tuple[str, str]
"""The subject of an anomaly: the rule that fired, and the tensor or scalar for which the rule fired.

NON_FINITE replaces the rule if the value is NaN or infinite.
"""


def subject_of(rule: str | None, tensor: str | None, op: str | None, value: float | None) -> Subject:
    """Return the subject of one anomaly."""
    is_non_finite = op in {"nans", "infs"} or not math.isfinite(value or 0.0)
    return NON_FINITE if is_non_finite else rule or "", tensor or op or ""


SEVERITIES: Final = (Severity.INFO, Severity.WARNING, Severity.CRITICAL)
"""Severities in ascending order. An unknown severity of a newer release counts as the lowest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """The causally first anomaly of one rank at one step, and the number of anomalies of that rank at that step."""

    run: str
    attempt: int
    rank: int | None  # None if no single rank is known to be the cause
    step: int | None
    severity: str  # the highest at this step
    causal: tuple[float, ...]
    events: int = 1
    rule: str | None = None
    kind: str | None = None
    tensor: str | None = None
    op: str | None = None
    value: float | None = None
    baseline: float | None = None
    threshold: float | None = None
    message: str | None = None
    ranks: str | None = None  # text such as `ranks 0-1`, if several ranks are concerned
    further_subjects: frozenset[Subject] = frozenset()  # of all anomalies of the step
    at: int | None = None  # time in UTC µs, if it was found after the process or attempt had ended
    ts: int | None = None  # time of its record in UTC µs

    @property
    def subjects(self) -> frozenset[Subject]:
        """Return the subjects of all anomalies of the rank at the step.

        A subject is a rule and the tensor or scalar for which the rule fired.
        """
        return self.further_subjects | {subject_of(self.rule, self.tensor, self.op, self.value)}

    @property
    def score(self) -> float:
        """Return the value of the anomaly divided by the largest value that the rule allows.

        Return NaN if the rule has no threshold.
        """
        if self.value is None or not self.threshold:
            return math.nan
        allowed = self.threshold if self.baseline is None else self.baseline * (1 + self.threshold)
        return abs(self.value) / allowed if allowed else math.inf

    @property
    def ranks_named(self) -> str:
        """Return the affected ranks as text: `rank 3`, `ranks 0-1`, or `rank unknown`."""
        return self.ranks or f"rank {'unknown' if self.rank is None else self.rank}"

    @property
    def urgency(self) -> int:
        """Return the index of the severity in SEVERITIES; a higher number is more severe."""
        return urgency(self.severity)


def urgency(severity: str | None) -> int:
    """Return the index of `severity` in SEVERITIES, or 0 if it is unknown; a higher number is more severe."""
    return SEVERITIES.index(Severity(severity)) if severity in SEVERITIES else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """The part of an incident that was found in a log: its address, its last rows, and hints for reading the rows."""

    address: str
    rows: tuple[str, ...] = ()
    guide: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Incident:
    """A group of anomalies with one cause, or the failure or stall of one attempt."""

    first: Symptom
    severity: str
    opened_at: float
    last_step: int | None
    seen_at: float = 0.0  # time of its latest anomaly, in monotonic seconds
    events: int = 0
    largest: float = -math.inf  # value of the later firings of its first rule and scalar
    ranks: set[int] = field(default_factory=set)
    subjects: set[Subject] = field(default_factory=set)
    is_settled: bool = False
    is_muted: bool = False
    is_listed: bool = False  # among others in one message
    began_at: float = math.nan  # time of its first anomaly; after a restart of the service before opened_at
    told_at: float = math.nan  # time of the last message about it
    cause: str | None = None  # the evidence against the rank, or why none is singled out
    reports: tuple[str, ...] = ()  # last step and report of each rank, if no rank is singled out
    places: tuple[str, ...] = ()  # the collectives and source lines in which ranks wait
    log: LogReport | None = None  # if it was found in a log that is followed
    fixed_key: str | None = None  # set when the incident settles, so that an earlier cause does not change the key

    def __post_init__(self) -> None:
        self.subjects |= self.first.subjects
        self.began_at, self.told_at = (self.opened_at if math.isnan(at) else at for at in (self.began_at, self.told_at))

    @property
    def attempt_key(self) -> AttemptKey:
        """Return (run, attempt number) of the incident."""
        return self.first.run, self.first.attempt

    @property
    def key(self) -> str:
        """Return the unique key of the incident. If the same records are evaluated again, the key is the same."""
        return self.fixed_key or incident_key(self.first)

    def awaited(self, live: Mapping[int, int | None]) -> list[int]:
        """Return the live ranks that have not yet delivered the step of the first anomaly of the incident.

        `live` maps each live rank to the last step that it delivered, or to None if it has delivered no step.
        """
        step = self.first.step
        return [] if step is None else [rank for rank, last in live.items() if last is None or last < step]


def incident_key(first: Symptom) -> str:
    """Return a hash of `first`, the first anomaly of an incident, as 16 hexadecimal digits.

    The hash depends on run, attempt, step, rank, kind, tensor and rule of this anomaly; without a step, on its time.
    """
    place = first.ts if first.step is None else first.step
    parts = (first.run, first.attempt, place, first.rank, first.kind, first.tensor, first.rule)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def failure_key(run: str, attempt: int) -> str:
    """Return the incident key of the failure of an attempt.

    The key does not depend on when or how the failure was detected.
    """
    return f"{RUN_FAILED}:{attempt}:{run}"


def run_incident(
    rule: str,
    attempt: Attempt,
    *,
    rank: int | None,
    reason: str,
    cause: str,
    opened_at: float,
    reports: tuple[str, ...] = (),
    places: tuple[str, ...] = (),
) -> Incident:
    """Return the incident of a failed (RUN_FAILED) or stalled (RUN_STALLED) attempt.

    The incident is settled, which means that it does not wait for further records before it is announced. `rank` is the
    rank that failed first or that blocks the others, or None if it is unknown. `cause` is the evidence for that rank.
    """
    failed = attempt.ranks.get(rank) if rank is not None and rule == RUN_FAILED else None
    # Other ranks may have begun the next step. The last steps of a rank without an exit report may not have arrived.
    own_step = failed.last_step if failed is not None and failed.exited_at is not None else None
    first = Symptom(
        run=attempt.run,
        attempt=attempt.number,
        rank=rank,
        step=attempt.last_step if own_step is None else own_step,
        severity=Severity.CRITICAL,
        causal=(),
        rule=rule,
        message=reason,
        at=attempt.ended_at,
    )
    stall_key = f"{RUN_STALLED}:{attempt.number}:{attempt.last_step}:{attempt.run}"
    return Incident(
        first=first,
        severity=first.severity,
        opened_at=opened_at,
        last_step=first.step,
        events=1,
        ranks=set() if rank is None else {rank},
        is_settled=True,
        cause=cause,
        reports=reports if rank is None else (),
        places=places,
        fixed_key=failure_key(*attempt.key) if rule == RUN_FAILED else stall_key,
    )
