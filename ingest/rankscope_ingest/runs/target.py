"""One rank as the service sees it: who it is, how far it was read and committed, and how it is."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from rankscope_contract.protocol.channel import NOTHING, Registration
from rankscope_ingest.runs.models import Liveness


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
    liveness: Liveness
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
    gone_at: float | None = None
    last_ts: int | None = None  # UTC µs of the newest record taken, by the clock of the rank
    given_up: int = NOTHING  # up to this seq, what was not taken was counted as lost when the process vanished
    uncommitted: deque[tuple[int, int]] = field(default_factory=deque)  # (last seq, rows) of each body on its way

    @property
    def incarnation(self) -> str:
        """Return the id of the process."""
        return self.registration.incarnation

    @property
    def identity(self) -> tuple[str, str, int]:
        """Return what at most one live process may be: run, launch, rank."""
        return self.registration.run, self.registration.launch_id, self.registration.rank

    @property
    def is_gone(self) -> bool:
        """Return whether the process ended, or is taken for dead."""
        return self.health is Health.GONE

    @property
    def is_dead(self) -> bool:
        """Return whether somebody else speaks for the process, from its spool."""
        return self.registration.served_by is not None

    @property
    def name(self) -> str:
        """Return run and rank for people and for the `instance` label."""
        return f"{self.registration.run}/{self.registration.rank}"

    @property
    def lag_records(self) -> int:
        """Return how many published records are not durable yet."""
        return max(0, self.head - self.committed)

    def leave(self, now: float) -> None:
        """Stop following the process: it ended, or is taken for dead."""
        self.health, self.gone_at = Health.GONE, now

    def commit(self, seq: int) -> int:
        """Note that everything up to `seq` is durable; return how many rows that made so."""
        self.committed = max(self.committed, seq)
        rows = 0
        while self.uncommitted and self.uncommitted[0][0] <= seq:
            rows += self.uncommitted.popleft()[1]
        return rows
