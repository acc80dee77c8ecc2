"""Symptoms and incidents: the values that detection produces, and that rows and notifications are made of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rankscope_contract.model.events import Severity
from rankscope_ingest.runs.models import AttemptKey

SEVERITIES: Final = (Severity.INFO, Severity.WARNING, Severity.CRITICAL)
"""Ascending; an unknown word of a newer sender counts as the lowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """The causally first anomaly of one rank at one step, and how many there were."""

    run: str
    attempt: int
    rank: int | None  # None where nothing singles out one rank
    step: int | None
    severity: str  # the worst at this step
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
    ranks: str | None = None  # in words, where it is not a matter of `rank` alone

    @property
    def who(self) -> str:
        """Return the ranks to name: `rank 3`, `ranks 0-1`, or `rank unknown`."""
        return self.ranks or f"rank {'unknown' if self.rank is None else self.rank}"

    @property
    def urgency(self) -> int:
        """Return the position of the severity among all."""
        return urgency(self.severity)


def urgency(severity: str | None) -> int:
    """Return a number that grows with the severity."""
    return SEVERITIES.index(Severity(severity)) if severity in SEVERITIES else 0


@dataclass(slots=True, kw_only=True)
class Incident:
    """Anomalies of one cause."""

    first: Symptom
    severity: str
    opened_at: float
    last_step: int | None
    events: int = 0
    ranks: set[int] = field(default_factory=set)
    is_settled: bool = False
    is_muted: bool = False
    is_last_before_mute: bool = False
    cause: str | None = None  # the evidence against the rank, or why none is singled out
    reports: tuple[str, ...] = ()  # the last step and report of each rank, where no rank is singled out
    lines: tuple[str, ...] = ()  # which ranks wait where
    fixed_key: str | None = None  # set when it settles, so that a later first cause does not rename it

    @property
    def attempt_key(self) -> AttemptKey:
        """Return the run and attempt it belongs to."""
        return self.first.run, self.first.attempt

    @property
    def key(self) -> str:
        """Return what identifies the incident, equal whenever the same records are judged again."""
        return self.fixed_key or incident_key(self.first)

    def awaited(self, live: Mapping[int, int | None]) -> list[int]:
        """Return the live ranks that have not delivered the first step yet."""
        step = self.first.step
        return [] if step is None else [rank for rank, last in live.items() if last is None or last < step]


def incident_key(first: Symptom) -> str:
    """Return a short text that the same first cause always has."""
    parts = (first.run, first.attempt, first.step, first.rank, first.kind, first.tensor, first.rule)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def headline(first: Symptom) -> str:
    """Return one line that names what happened and where: rule, kind, tensor, rank, step."""
    what = first.rule or "anomaly"
    where = " of ".join(part for part in (first.kind, first.tensor) if part)
    parts = [what, f"in {where}" if where else None, first.who]
    parts.append(None if first.step is None else f"step {first.step}")
    return ", ".join(part for part in parts if part).replace(", in ", " in ", 1)
