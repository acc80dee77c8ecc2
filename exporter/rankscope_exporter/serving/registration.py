"""Keeps the service informed of this rank from a daemon thread: registers, repeats it as a heartbeat, pokes.

The publisher only sets a flag here; whatever the network does, it does to this thread alone. A service that polls a
rank knows that it lives: the heartbeat is for one that does not, since it cannot, or has forgotten.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from rankscope_contract.protocol.channel import Registration, RegistrationReply
from rankscope_exporter.process.threads import CpuMeter, OwnThread
from rankscope_exporter.serving.service_client import RefusedError, UnreachableError

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS: Final = 0.25
MAX_RETRY_SECONDS: Final = 4.0
DRAIN_HEARTBEAT_SECONDS: Final = 0.5
"""While a rank drains, the reply's `committed` is what it waits for."""
MOST_SELDOM_SECONDS: Final = 60.0
"""However often a rank is polled, it speaks again after this long."""
_SILENT_INTERVALS: Final = 1.5
"""So many intervals of heartbeats a rank is silent after a poll. By default a calm rank is polled once in one of them,
at times a little later: with 1, of 20 ranks, one spoke at every fourth poll, for nothing."""
_HEARTBEAT_LIMITS: Final = (0.1, MOST_SELDOM_SECONDS)
_SPREAD: Final = random.Random()  # noqa: S311 - no secret; its own state, since training may have seeded the shared one


class Client(Protocol):
    """What registration needs of the service."""

    def register(self, registration: Registration) -> RegistrationReply:
        """Tell the service about this rank."""
        ...

    def poke(self, incarnation: str) -> None:
        """Ask the service to pull now."""
        ...


class RegistrationLoop:
    """Registers until stopped. `describe` makes the message, `on_reply` gets every answer, both on this thread."""

    def __init__(
        self,
        client: Client,
        describe: Callable[[], Registration],
        on_reply: Callable[[RegistrationReply], None],
        *,
        on_fault: Callable[[str, BaseException], None],
        meter: CpuMeter,
    ) -> None:
        self._client = client
        self._describe = describe
        self._on_reply = on_reply
        self._on_fault = on_fault
        self._meter = meter
        self._wake = threading.Condition()
        self._stopping = False
        self._poke_wanted = False
        self._speak_now = False
        self._draining = False
        self._registered = False
        self._pause = 0.0  # between two heartbeats, as the service asked for
        self._spoke_at = self._polled_at = -math.inf
        self._logged: set[str] = set()
        self._attempted = threading.Event()
        self._thread = OwnThread(target=self._run, name="rankscope-registration")

    def start(self) -> None:
        """Begin to register."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a call in flight ends with its own time-out."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout=1.0)

    def poke(self) -> None:
        """Ask for an early pull, best effort; returns at once."""
        with self._wake:
            self._poke_wanted = True
            self._wake.notify()

    def drain(self) -> None:
        """Say at once that the rank drains, and then often."""
        with self._wake:
            self._draining = self._speak_now = self._poke_wanted = True
            self._wake.notify()

    def wait_attempted(self, timeout_seconds: float) -> None:
        """Wait until the service was asked for the first time: a run may end before its first registration does."""
        self._attempted.wait(timeout_seconds)

    def speak(self) -> None:
        """Send the next heartbeat at once: what it says has changed."""
        with self._wake:
            self._speak_now = True
            self._wake.notify()

    def polled(self) -> None:
        """Note a poll of the service that registered this rank. Wakes nobody: it is seen when a heartbeat is due."""
        self._polled_at = time.monotonic()

    def _run(self) -> None:
        failures = 0
        due = 0.0
        while True:
            with self._wake:
                while not self._stopping and not self._has_work(due := self._postponed(due)):
                    self._wake.wait(max(0.0, due - time.monotonic()))
                if self._stopping:
                    return
                register = not self._registered or self._speak_now or time.monotonic() >= due
                poke, self._poke_wanted, self._speak_now = self._poke_wanted, False, False
            if register:
                wait = self._register()
                self._attempted.set()
                failures = 0 if wait is not None else failures + 1
                due = time.monotonic() + (retry_seconds(failures) if wait is None else wait)
            if poke and self._registered:
                self._poke_service()
            self._meter.lap("registration")

    def _postponed(self, due: float) -> float:
        if not self._registered or self._draining:
            return due
        return next_heartbeat(due, spoke_at=self._spoke_at, polled_at=self._polled_at, pause_seconds=self._pause)

    def _has_work(self, due: float) -> bool:
        # Between failed attempts a poke must wait as well: it would only hammer a service that is down.
        return time.monotonic() >= due or (self._registered and (self._poke_wanted or self._speak_now))

    def _register(self) -> float | None:
        """Register once; return the seconds until the next heartbeat, None when it failed."""
        try:
            reply = self._client.register(self._describe())
        except RefusedError as error:
            self._registered = False
            self._log_once(f"the service refuses this rank ({error}); trying again")
            return None
        except UnreachableError as error:
            self._registered = False
            self._log_once(f"the service cannot be reached ({error}); trying again")
            return None
        except Exception as error:  # noqa: BLE001 - the thread's edge: told to the façade, and tried again
            self._registered = False
            self._on_fault("registration", error)
            return None
        self._registered = True
        self._logged.clear()
        self._on_reply(reply)
        least, most = _HEARTBEAT_LIMITS
        self._spoke_at, self._pause = time.monotonic(), min(max(reply.heartbeat_seconds, least), most)
        return min(self._pause, DRAIN_HEARTBEAT_SECONDS) if self._draining else self._pause

    def _poke_service(self) -> None:
        try:
            self._client.poke(self._describe().incarnation)
        except (RefusedError, UnreachableError) as error:
            log.debug("poke was not heard: %s", error)
        except Exception as error:  # noqa: BLE001 - the edge of the thread, which goes on with its heartbeats
            self._on_fault("asking for an early pull", error)

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log.warning("%s", text)


def next_heartbeat(due: float, *, spoke_at: float, polled_at: float, pause_seconds: float) -> float:
    """Return when a rank speaks whose heartbeat is `due`: not yet where the service polls it, but once in a while."""
    return max(due, min(polled_at + _SILENT_INTERVALS * pause_seconds, spoke_at + MOST_SELDOM_SECONDS))


def retry_seconds(failures: int, jitter: Callable[[], float] = _SPREAD.random) -> float:
    """Return how long to wait after so many failures in a row: doubled each time, capped, and spread by up to a half.

    Without the spread, all ranks of a large job would come back to a restarted service in the same instant.
    """
    longest = min(MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(failures - 1, 16))
    return longest * (0.5 + 0.5 * jitter())
