"""One polled process: its identity, the positions up to which its records were read and committed, and its health."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from rankscope_contract.protocol.channel import NOTHING, Registration
from rankscope_ingest.runs.models import AttemptKey, Liveness


class Health(enum.StrEnum):
    """Health of a target according to its latest polls."""

    PENDING = "pending"  # registered, not polled yet
    UP = "up"
    DRAINING = "draining"  # the process waits until its last records are committed
    FAILING = "failing"  # the last poll failed; the service retries
    GONE = "gone"  # the process ended or vanished; it is no longer polled


@dataclass(slots=True, kw_only=True)
class Target:
    """A process of a rank that the service polls, and the sequence numbers of its records that were read and committed.

    A target is changed only on the event loop of the service.
    """

    registration: Registration
    attempt: int
    lease: str
    liveness: Liveness
    cursor: int = NOTHING  # last seq taken; the next poll requests records after it
    committed: int = NOTHING  # last seq that is durable; it is reported to the rank
    head: int = NOTHING  # newest seq that the rank is known to have published
    expected: int = NOTHING  # newest seq after the queue of the rank at its latest sign of life is published
    health: Health = Health.PENDING
    last_error: str | None = None
    last_scrape: float | None = None  # seconds of the service's monotonic clock
    last_scrape_seconds: float | None = None
    ring_fill: float = 0.0
    failures_in_row: int = 0
    records_lost: int = 0
    gone_at: float | None = None
    last_ts: int | None = None  # UTC µs of the newest record taken, by the clock of the rank
    given_up: int = NOTHING  # records up to this seq that were not taken are counted as lost
    uncommitted: deque[tuple[int, int]] = field(default_factory=deque)  # last seq and rows of each pending body

    @property
    def incarnation(self) -> str:
        """Return the incarnation id, which identifies the process."""
        return self.registration.incarnation

    @property
    def attempt_key(self) -> AttemptKey:
        """Return (run, attempt number) of the process."""
        return self.registration.run, self.attempt

    @property
    def identity(self) -> tuple[str, str, int]:
        """Return (run, launch id, rank). At most one live process has this combination."""
        return self.registration.run, self.registration.launch_id, self.registration.rank

    @property
    def is_gone(self) -> bool:
        """Return whether the process ended or is considered dead."""
        return self.health is Health.GONE

    @property
    def is_dead(self) -> bool:
        """Return whether the process is dead and another process serves the dead process's records from its spool."""
        return self.registration.served_by is not None

    @property
    def name(self) -> str:
        """Return `<run>/<rank>` for log messages and for the label `instance`."""
        return f"{self.registration.run}/{self.registration.rank}"

    @property
    def lag_records(self) -> int:
        """Return the number of published records that are not committed yet."""
        return max(0, self.head - self.committed)

    def leave(self, now: float) -> None:
        """Stop polling the process at `now`, because it has ended or is considered dead."""
        self.health, self.gone_at = Health.GONE, now

    def commit(self, seq: int) -> int:
        """Record that all records up to `seq` are committed; return the number of rows that are newly committed."""
        self.committed = max(self.committed, seq)
        rows = 0
        while self.uncommitted and self.uncommitted[0][0] <= seq:
            rows += self.uncommitted.popleft()[1]
        return rows
