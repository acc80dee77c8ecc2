"""State and callbacks that the rank's server shares with its routes, and the list of recent clients.

`rankscope doctor` shows the recent clients. Values only; nothing here opens a socket.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.protocol.channel import (
    METRICS_PATH,
    NODE_METRICS_PATH,
    RECORDS_PATH,
    STATE_DRAINING,
    STATE_RUNNING,
)

MOST_CLIENTS: Final = 8
_LONGEST_NAME: Final = 80
_LISTED_PATHS: Final = frozenset({METRICS_PATH, NODE_METRICS_PATH, RECORDS_PATH})


@dataclass(slots=True)
class RankState:
    """State of this process that the server, the routes and the registration share. Plain stores, from any thread."""

    incarnation: str
    step: int | None = None
    """The last published step."""
    phase: str | None = None
    """The phase that the script announced, such as an evaluation."""
    lease: str | None = None
    """Lease of the service that registered this rank and may move `committed`; None before the first registration."""
    is_draining: bool = False
    """True while the rank waits for the commit of its last records."""
    is_closed: bool = False
    unencodable: int = 0
    """Number of nested rows that were left out of a stream because no column can hold them."""

    @property
    def name(self) -> str:
        """Return the state as the protocol names it: `running` or `draining`."""
        return STATE_DRAINING if self.is_draining else STATE_RUNNING


@dataclass(frozen=True, slots=True, kw_only=True)
class RankServerSources:
    """Functions of other parts of the session that the server calls while it answers a request.

    The server calls all of them on its own threads. A rank without a function for a request answers 503.
    """

    take_stacks: Callable[[], Mapping[str, Any]] | None = None
    """POST /stacks: takes and publishes the stacks of all threads, and returns them as a JSON object."""
    change_sampling: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """PUT /config: changes the sampling, and returns the current and the pending state. Raises ConfigError."""
    sampling_state: Callable[[], Mapping[str, Any]] | None = None
    """GET /config: returns the current sampling, shown under `measuring`."""
    stretch: Callable[[], int | None] = lambda: None
    """Metrics page: the factor by which the overhead controller has multiplied the sampling interval."""
    collectives: Callable[[], Mapping[str, tuple[int, int]]] = dict
    """Metrics page: number of calls and of bytes by operation."""


class RecentClients:
    """The clients that read a page most recently, at most MOST_CLIENTS. All methods may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], float] = {}  # the most recent client is the last entry

    def note(self, path: str, agent: str) -> None:
        """Store that the client `agent` has requested the page at `path`, with the time."""
        if path not in _LISTED_PATHS:
            return
        name = "".join(char if char.isprintable() else "?" for char in agent[:_LONGEST_NAME]) or "unnamed"
        with self._lock:
            self._seen.pop((path, name), None)
            self._seen[path, name] = self._clock()
            if len(self._seen) > MOST_CLIENTS:
                del self._seen[next(iter(self._seen))]

    def latest(self) -> list[dict[str, Any]]:
        """Return page, client name and seconds since the request, the most recent client first."""
        with self._lock:
            seen = list(reversed(self._seen.items()))
        now = self._clock()
        return [{"page": path, "by": by, "seconds_ago": round(now - at, 1)} for (path, by), at in seen]
