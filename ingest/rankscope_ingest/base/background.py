"""Background work on the event loop: periodic jobs, their faults, interruptible waits, and the cost of reads.

`ReadBudget` limits the CPU time of repeated reads of the store. A fault in a job stops neither the other jobs nor the
service.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope_contract.model.redaction import redacted_text

log = logging.getLogger(__name__)

RECENT_SECONDS: Final = 30.0
"""Time in seconds for which /healthz reports a fault of a background task."""

READ_SHARE: Final = 0.02
"""Maximum share of the time of one CPU core that repeated reads of the store may take, for stores of any size."""

_MAX_TEXT: Final = 300
_MAX_LOGGED: Final = 100
"""Maximum number of logged faults that are remembered so that each of them is logged only once.

At this number, the service forgets all of them. A limit is needed because the texts of faults can contain changing
numbers.
"""


class WakeUp:
    """A waiter for one task: the task waits with a timeout, and other code on the event loop can end the wait early.

    At most one task may wait at a time. The implementation uses a timer of the event loop, because `asyncio.timeout` is
    slower: on timeout, that function cancels the task and catches the exception.
    """

    def __init__(self) -> None:
        self._over = asyncio.Event()
        self._is_set = False

    def set(self) -> None:
        """End the current wait. If no task waits, end the next wait as soon as it begins."""
        self._is_set = True
        self._over.set()

    def clear(self) -> None:
        """Discard an earlier call of `set` that has not ended a wait yet, so that it does not end the next wait."""
        self._is_set = False
        self._over.clear()

    async def wait(self, seconds: float) -> bool:
        """Wait until `seconds` have passed or `set` is called; return whether `set` was called.

        `seconds` may be infinite.
        """
        timer = asyncio.get_running_loop().call_later(max(seconds, 0.0), self._over.set)
        try:
            await self._over.wait()
        finally:
            timer.cancel()
        is_set = self._is_set
        self.clear()
        return is_set


class BackgroundFaults:
    """Faults of background tasks. Each distinct fault is logged once; /healthz reports the recent faults.

    An operator must see these faults, because a task that fails at every start makes no progress. `counts` is the
    number of faults of each task since the start. `on_fault` is called with the name of the task.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, on_fault: Callable[[str], object] = lambda _: None
    ) -> None:
        self._clock = clock
        self._on_fault = on_fault
        self.counts: Counter[str] = Counter()
        self._latest: dict[str, tuple[float, str]] = {}
        self._logged: set[tuple[str, str]] = set()

    def report(self, task: str, error: Exception) -> None:
        """Record a fault of `task`, and log it unless the same fault was logged before."""
        text = redacted_text(repr(error), _MAX_TEXT)
        self.counts[task] += 1
        self._on_fault(task)
        self._latest[task] = (self._clock(), text)
        if (task, text) not in self._logged:
            log.error("unexpected error in %s, retrying", task, exc_info=error)
            if len(self._logged) >= _MAX_LOGGED:
                self._logged.clear()
            self._logged.add((task, text))

    def attempt(self, task: str, function: Callable[[], object]) -> None:
        """Call `function`. If it raises an exception, record the exception as a fault of `task` and return normally."""
        try:
            function()
        except Exception as error:  # noqa: BLE001 - it is logged and reported
            self.report(task, error)

    def recent(self) -> str | None:
        """Return the faults that background tasks had in the last `RECENT_SECONDS` as one text; None without faults."""
        now = self._clock()
        recent = [f"{task}: {text}" for task, (at, text) in self._latest.items() if now - at < RECENT_SECONDS]
        return f"background tasks failed, see the service's log: {'; '.join(recent)}" if recent else None


FAULTS: Final[ContextVar[BackgroundFaults]] = ContextVar("FAULTS", default=BackgroundFaults())  # noqa: B039 - only the service's own context replaces it
"""Faults of the service in whose context the code runs; each task inherits them from the task that started it."""

RETRY_SECONDS: Final = 1.0


def start_task(
    task: str, work: Callable[[], Coroutine[Any, Any, object]], *, is_repeated: bool = False
) -> asyncio.Task[None]:
    """Start `work()` as the task named `task`, and return it. An error is a fault of the task and is not raised.

    With `is_repeated`, `work` is called again after `RETRY_SECONDS`; otherwise an error ends the task. All tasks that
    no other code awaits are started here, so that none of them ends unseen.
    """

    async def guarded() -> None:
        while True:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - it is logged, counted and reported
                FAULTS.get().report(task, error)
                if is_repeated:
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
            return

    return asyncio.create_task(guarded(), name=task)


@dataclass(frozen=True, slots=True)
class Job:
    """A function that `run_jobs` calls repeatedly, with a pause of `seconds` from the end of a call to the next one.

    A coroutine function may run until it is cancelled; `seconds` is then the pause after a fault.
    """

    name: str
    seconds: float
    function: Callable[[], object]
    starts_immediately: bool = field(default=False, kw_only=True)


async def run_jobs(jobs: Sequence[Job], faults: BackgroundFaults) -> None:
    """Call each job in its own task until this coroutine is cancelled. Report exceptions to `faults`."""

    async def repeat(job: Job) -> None:
        if not job.starts_immediately:
            await asyncio.sleep(job.seconds)
        while True:
            try:
                result = job.function()
                if inspect.isawaitable(result):
                    await result
            except Exception as error:  # noqa: BLE001 - it is logged and reported
                faults.report(job.name, error)
            await asyncio.sleep(job.seconds)

    await asyncio.gather(*map(repeat, jobs))


class ReadBudget:
    """Schedules repeated reads of the store so that they take at most `READ_SHARE` of the time of one CPU core.

    The time from the start of a read to the start of the next read is at least the duration of the read divided by
    `READ_SHARE`. It is also at least n times `interval_seconds`: n is 1 after the first successful read and increases
    by 1 with each further successful read, up to `max_intervals`. For the pause after a failed read, n is 1. A failed
    read does not change the n of later successful reads.
    """

    def __init__(self, interval_seconds: float, *, clock: Callable[[], float], max_intervals: int = 1) -> None:
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._max_intervals = max_intervals
        self._intervals = 0
        self._next_at = -math.inf

    @property
    def is_due(self) -> bool:
        """Return whether the time of the next read of the store has come."""
        return self._clock() >= self._next_at

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Return a context manager for one read of the store.

        The context manager measures the duration of the read in its body, and schedules the next read accordingly.
        """
        began, intervals = self._clock(), 1
        self._next_at = began + self._interval_seconds
        try:
            yield
            intervals = self._intervals = min(self._intervals + 1, self._max_intervals)
        finally:
            seconds = self._clock() - began
            self._next_at = began + max(intervals * self._interval_seconds, seconds / READ_SHARE)


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel `tasks` and wait until they have ended. Their results and exceptions are discarded."""
    listed = list(tasks)
    for task in listed:
        task.cancel()
    await asyncio.gather(*listed, return_exceptions=True)
