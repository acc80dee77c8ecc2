"""One rank as the service sees it: who it is, how far it was read and committed, and how it is."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from rankscope_contract.channel import NOTHING, Registration
from rankscope_ingest.vitals import Vitals


class Health(enum.StrEnum):
    """How a target answers."""

    PENDING = "pending"  # registered, not polled yet
    UP = "up"
    DRAINING = "draining"  # it waits for its last records to be committed
    FAILING = "failing"  # the last poll brought an error; it is tried again
    GONE = "gone"  # it ended, or vanished; no longer polled


@dataclass(slots=True, kw_only=True)
class Target:
    """A registered incarnation and its cursor. Mutated only on the service's event loop."""

    registration: Registration
    attempt: int
    lease: str
    vitals: Vitals
    cursor: int = NOTHING  # last seq taken; what comes next is asked for after it
    committed: int = NOTHING  # last seq that is durable; passed back to the rank
    head: int = NOTHING  # newest seq the rank is known to have published
    health: Health = Health.PENDING
    last_error: str | None = None
    last_scrape: float | None = None  # seconds of the service's monotonic clock
    last_scrape_seconds: float | None = None
    ring_fill: float = 0.0
    failures_in_row: int = 0
    records_lost: int = 0
    plans_seen: set[str] = field(default_factory=set)

    @property
    def incarnation(self) -> str:
        """Return the id of the process."""
        return self.registration.incarnation

    @property
    def identity(self) -> tuple[str, str, int]:
        """Return what at most one live process may be: run, launch, rank."""
        return self.registration.run, self.registration.launch_id, self.registration.rank

    @property
    def name(self) -> str:
        """Return run and rank for people and for the `instance` label."""
        return f"{self.registration.run}/{self.registration.rank}"

    @property
    def lag_records(self) -> int:
        """Return how many published records are not durable yet."""
        return max(0, self.head - self.committed)
