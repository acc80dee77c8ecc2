"""State and callbacks that the server of a rank shares with its routes, and the list of recent clients.

`rankscope doctor` shows the recent clients. The module opens no socket.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.wire.channel import METRICS_PATH, RECORDS_PATH, STATE_DRAINING, STATE_RUNNING

MOST_CLIENTS: Final = 8
_LONGEST_NAME: Final = 80
_LISTED_PATHS: Final = frozenset({METRICS_PATH, RECORDS_PATH})


@dataclass(slots=True)
class RankState:
    """State of this process that the server, the routes and the registration share.

    Any thread may assign its attributes without a lock.
    """

    incarnation: str
    step: int | None = None
    """Number of the step of the record that was published last."""
    phase: str | None = None
    """Name of the phase that the script announced, such as an evaluation."""
    lease: str | None = None
    """Lease, a token that the service returned when it registered this rank; None before the first registration.

    Only the holder of the lease may mark records as committed.
    """
    is_draining: bool = False
    """True while the rank waits for the commit of its last records."""
    is_closed: bool = False
    unencodable: int = 0
    """Number of rows of nested datasets, such as events, that were not sent, as their values do not fit the columns."""

    @property
    def name(self) -> str:
        return STATE_DRAINING if self.is_draining else STATE_RUNNING


@dataclass(frozen=True, slots=True, kw_only=True)
class RankServerSources:
    """Functions of other components of the monitor that the server calls while it answers a request.

    The server calls all of them on its own threads. A rank without a function for a request answers 503.
    """

    take_stacks: Callable[[], Mapping[str, Any]] | None = None
    """Function for POST /stacks.

    It reads and publishes the stacks of all threads, and returns a JSON object with the stacks.
    """
    change_sampling: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """Function for PUT /config.

    It changes the sampling, and returns the current and the pending settings. Raises ConfigError if the request is
    invalid.
    """
    sampling_state: Callable[[], Mapping[str, Any]] | None = None
    """Function for GET /config.

    It returns the current sampling settings, which the answer contains under the key `measuring`.
    """
    queued: Callable[[], int] = lambda: 0
    """Function that returns the number of records which the service must count as lost if this process dies now.

    They are the records of ended steps that are not published, and the dropped ones that no event has reported.
    """
    stretch: Callable[[], int | None] = lambda: None
    """Function for the metrics page.

    It returns the factor by which the overhead controller has multiplied the sampling interval.
    """
    collectives: Callable[[], Mapping[str, tuple[int, int]]] = dict
    """Function for the metrics page. It returns the number of calls and of bytes for each collective operation."""


class RecentClients:
    """The clients that most recently requested a page of this rank, at most 8 (MOST_CLIENTS).

    All methods may be called from any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], float] = {}  # the most recent client is the last entry

    def note(self, path: str, agent: str) -> None:
        """Record the time at which the client `agent` requested `path`."""
        if path not in _LISTED_PATHS:
            return
        name = "".join(char if char.isprintable() else "?" for char in agent[:_LONGEST_NAME]) or "unnamed"
        with self._lock:
            self._seen.pop((path, name), None)
            self._seen[path, name] = self._clock()
            if len(self._seen) > MOST_CLIENTS:
                del self._seen[next(iter(self._seen))]

    def latest(self) -> list[dict[str, Any]]:
        """Return path, client name and seconds since the last request of each client, the most recent client first."""
        with self._lock:
            seen = list(reversed(self._seen.items()))
        now = self._clock()
        return [{"page": path, "by": by, "seconds_ago": round(now - at, 1)} for (path, by), at in seen]
