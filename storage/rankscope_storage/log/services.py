"""Services that share one store: their addresses, their number, and the lease of the one that maintains the store.

All of it is in the Delta log. Each commit of a service names its shard and its address. A service that commits nothing
else commits its address every RENEW_SECONDS, so that a service without a commit for LEASE_SECONDS is dead. A single
service does so only if it has no file lock. The transaction SERVICES has the number of services. The transaction
MAINTENANCE has the shard whose service compacts, vacuums and removes expired rows: a count of its changes, and in the
lowest 16 bits the number of the shard. Running services do not compare clocks of machines: each one measures the time
since it has seen a commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rankscope_storage.base.errors import ServicesError, ShardLockError
from rankscope_storage.base.shards import Shard
from rankscope_storage.log.delta import Log
from rankscope_storage.log.shard_lock import HISTORY, OWNER, SHARD, lock_of_service

LEASE_SECONDS: Final = 30.0
"""Time without a commit after which a service counts as dead: three intervals of renewal."""
RENEW_SECONDS: Final = 10.0

SERVICES: Final = "services"
MAINTENANCE: Final = "maintenance"
ADDRESS: Final = "rankscopeService"
"""Key in the commit information: the URL of the service, empty before it listens. Commits of other writers lack it."""
_SHARD_BITS: Final = (1 << 16) - 1
"""Bits of the transaction MAINTENANCE that have the number of the shard."""


def service_count(log: Log) -> int:
    """Return the number N of services of the store, as of the version of the handle."""
    return log.transaction(SERVICES) or 1


def check_count(log: Log, shard: Shard, *, is_locked: bool) -> None:
    """Raise ServicesError if a service runs that was started with another number N of services than `shard`.

    With `is_locked`, services of this machine hold locks. Otherwise a service runs if its last commit is younger than
    LEASE_SECONDS.
    """
    if (known := service_count(log)) == shard.count:
        return
    holder = lock_of_service(log.root, shard) if is_locked else None
    if not is_locked:
        recent = (one for one in service_owners(log) if one.shard.count == known and one.seconds_ago < LEASE_SECONDS)
        holder = next((f"{one.shard}, {one.owner}, last commit {one.age}" for one in recent), None)
    if holder is not None:
        wait = "" if is_locked else f", and wait {LEASE_SECONDS:.0f} s"
        raise ServicesError(
            f"{log.root} is shared by services with N = {known}, and this one has the shard {shard}: a service of the "
            f"shard {holder}, is running. Start all services with the same N, or stop the others first{wait}"
        )


def check_is_no_service(log: Log, shard: Shard) -> None:
    """Raise ShardLockError if `shard` has a service with a commit in the last LEASE_SECONDS."""
    owner = next((one for one in service_owners(log) if one.shard == shard), None)
    if owner is not None and owner.seconds_ago < LEASE_SECONDS:
        raise ShardLockError(
            f"shard {shard} of {log.root} belongs to a service ({owner.owner}, last commit {owner.age}): write to "
            f"another shard, such as --shard {shard.count}/{shard.count + 1}, or stop the service and wait "
            f"{LEASE_SECONDS:.0f} s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOwner:
    """The service that made the newest commit of `shard`, and the age of this commit by the clock of its machine.

    `url` is empty if the service has claimed the shard and does not listen yet.
    """

    shard: Shard
    owner: str
    url: str
    seconds_ago: float
    is_maintaining: bool

    @property
    def age(self) -> str:
        """The age as text, which reports a clock that is more than one second ahead of this one."""
        if self.seconds_ago < -1:
            return f"{-self.seconds_ago:.0f} s in the future: correct the clocks of the machines"
        return f"{max(0, self.seconds_ago):.0f} s ago"


def service_owners(log: Log) -> list[ServiceOwner]:
    """Return the service of each shard with a commit of a service among the newest entries of the log."""
    newest: dict[str, Mapping[str, Any]] = {}
    for info in log.history(HISTORY):
        if ADDRESS in info:
            newest.setdefault(info[SHARD], info)
    maintaining = Shard((log.transaction(MAINTENANCE) or 0) & _SHARD_BITS, service_count(log))
    return [
        ServiceOwner(
            shard=(parsed := Shard.parse(shard)),
            owner=str(info[OWNER]),
            url=str(info[ADDRESS]),
            seconds_ago=time.time() - info["timestamp"] / 1000,
            is_maintaining=parsed == maintaining,
        )
        for shard, info in sorted(newest.items())
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The services that share the store: the address of each one that is alive, by number of its shard."""

    addresses: Mapping[int, str]
    is_maintaining: bool
    version: int


class Services:
    """The services of a store, as the service of `shard` sees them in the log. Times are in monotonic seconds."""

    def __init__(self, shard: Shard, clock: Callable[[], float] = time.monotonic) -> None:
        self.shard = shard
        self._clock = clock
        self._seen: dict[int, tuple[str, float]] = {}  # address and time of the last commit, by number of the shard

    def see(self, infos: Iterable[Mapping[str, Any]]) -> None:
        """Add commits, the oldest first, from their commit information."""
        for info in infos:
            if ADDRESS in info:
                shard = Shard.parse(info[SHARD])
                if shard.count == self.shard.count:
                    self._seen[shard.number] = (str(info[ADDRESS]), self._clock())

    def addresses(self) -> dict[int, str]:
        """Return the address of each service that is alive, by number of its shard."""
        limit = self._clock() - LEASE_SECONDS
        return {number: url for number, (url, seen) in sorted(self._seen.items()) if seen >= limit and url}

    def must_renew(self, url: str) -> bool:
        """Return whether this service has not committed its address `url` for RENEW_SECONDS."""
        known, seen = self._seen.get(self.shard.number, ("", 0.0))
        return known != url or self._clock() - seen >= RENEW_SECONDS

    def maintains(self, number: int | None) -> bool:
        """Return whether this service maintains the store, from the number of the transaction MAINTENANCE."""
        return number is not None and number & _SHARD_BITS == self.shard.number

    def next_maintainer(self, number: int | None) -> int | None:
        """Return the number with which this service takes over the maintenance; None if its service is alive."""
        if number is not None and number & _SHARD_BITS in self.addresses():
            return None
        return (((number or 0) | _SHARD_BITS) + 1) | self.shard.number
