"""Signs of life of one process: when it was last heard of, and when its port last turned out to be closed."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long silence may last before it means that a process is gone."""

    refused_after_seconds: float  # nobody listens any more, and no heartbeat came since
    failed_after_seconds: float  # silence for whatever reason: a host may be down, or a network cut


@dataclass(slots=True, kw_only=True)
class Vitals:
    """Times are seconds of the service's monotonic clock."""

    last_sign: float
    last_refused: float = -math.inf

    def heard(self, now: float) -> None:
        """Note a heartbeat or any answer."""
        self.last_sign = max(self.last_sign, now)

    def refused(self, now: float) -> None:
        """Note that nobody listened, or somebody else."""
        self.last_refused = max(self.last_refused, now)

    def excuse(self, seconds: float, now: float) -> None:
        """Take a time in which nobody listened off the silence, of which there is none at `now` at the least."""
        shift = min(seconds, now - self.last_sign)
        self.last_sign += shift
        self.last_refused += shift

    def is_alive(self, now: float, ttl_seconds: float) -> bool:
        """Return whether the process must be assumed to run: heard of lately, and not found gone since."""
        return self.last_refused <= self.last_sign and now - self.last_sign < ttl_seconds

    def has_vanished(self, now: float, patience: Patience) -> bool:
        """Return whether the process must be assumed dead.

        A closed port alone is not enough: while heartbeats come, only the exporter's server may have failed.
        """
        silence = now - self.last_sign
        is_refused = self.last_refused > self.last_sign
        return silence >= (patience.refused_after_seconds if is_refused else patience.failed_after_seconds)
