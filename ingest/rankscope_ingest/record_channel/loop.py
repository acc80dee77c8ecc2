"""Poll one target: request records, check them, and pass them to the sink. Each target has one asyncio task.

The cursor, which is the last received sequence number, moves when the rows are added to the batch. The rank receives
`committed`, the last committed sequence number, only after the commit.

`PollBudget` limits the bytes requested from all ranks together to the free memory. Received rows are counted only when
they arrive, and thousands of responses may be on their way. A poll therefore reserves rows before its request, and
requests only the number of bytes that these rows are expected to take. The limit does not depend on the number of
waiting records that a rank last reported, because that number may be out of date. A poll waits if there is no capacity.
A rank that hangs holds its reservation until the timeout. A rank that missed its last poll is therefore asked for a
single record. All such ranks together have a quarter of the capacity, so that they do not block healthy ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import pyarrow as pa

from rankscope_ingest.base.background import WakeUp
from rankscope_ingest.base.errors import DecodeError, FetchError
from rankscope_ingest.record_channel.bodies import PlanCache, PlanColumns, RowContext, ValidBody, check, plan_ids
from rankscope_ingest.record_channel.client import (
    Answer,
    Body,
    Drained,
    NothingNew,
    OtherProcess,
    RingStatus,
    open_stream,
)
from rankscope_ingest.runs.models import Health, Target

_SPARE_SHARE: Final = 16
"""Divisor that determines how many rows a poll may reserve beyond the rows that are expected from its rank.

A rank may have more records than expected. A poll therefore reserves up to a 16th of half of the free capacity, if that
is more than the expected rows. The other half is only for expected rows, so that hundreds of hanging ranks cannot
reserve all capacity.
"""

_FAILING_SHARE: Final = 4


@dataclass(slots=True, kw_only=True)
class _Lane:
    """The reservations of one group of ranks (healthy or failing), and the polls of this group that wait for capacity.

    `reserved` is the number of reserved rows; its limit is `max_rows`.
    """

    max_rows: float = math.inf
    reserved: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class PollBudget:
    """Limits the number of rows that all polls together request.

    `free_rows` returns the number of further rows for which there is memory. `max_rows` is the total capacity in rows,
    and `max_bytes` the maximum size of a response.
    """

    def __init__(self, free_rows: Callable[[], int], *, max_rows: int, max_bytes: int) -> None:
        self._free_rows = free_rows
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._records = self._rows = self._bytes = 0  # of all bodies so far
        self._healthy, self._failing = _Lane(), _Lane(max_rows=max_rows / _FAILING_SHARE)

    @property
    def is_used_up(self) -> bool:
        """Return whether polls must wait for the next commit, because too many rows are waiting."""
        return self._free_rows() <= 0

    def learn(self, *, records: int, rows: int, size: int) -> None:
        """Update the average numbers of rows and bytes per record with a received body of `size` uncompressed bytes.

        The parameter `max_bytes` of a poll request also counts uncompressed bytes.
        """
        self._records += records
        self._rows += rows
        self._bytes += size

    @contextlib.asynccontextmanager
    async def reserved(self, records: int, *, is_failing: bool = False) -> AsyncIterator[int]:
        """Wait for capacity, reserve rows for a rank that has `records` records, and yield the bytes to request.

        `is_failing` states that the rank missed its last poll; only rows for a single record are then reserved. The
        yielded number of bytes is 0 if received rows use all capacity; the caller then waits for a commit.
        """
        lane = self._failing if is_failing else self._healthy
        least = self._expected(1 if is_failing else records)
        while self._must_wait(lane, least):
            await self._wait_in(lane)
        if self.is_used_up:
            self._wake_next()
            yield 0
            return
        spare = 0 if is_failing else (self._free_rows() // 2 - self._reserved) // _SPARE_SHARE
        rows = max(least, min(spare, self._max_response_rows()))
        lane.reserved += rows
        self._wake_next()
        try:
            yield self._bytes_of(rows)
        finally:
            lane.reserved -= rows
            self._wake_next()

    @property
    def _reserved(self) -> int:
        return self._healthy.reserved + self._failing.reserved

    def _must_wait(self, lane: _Lane, rows: int) -> bool:
        """Return whether a poll must wait before it reserves `rows` rows.

        If no other poll has reserved rows, the poll need not wait, whatever the number of rows.
        """
        if lane.reserved and lane.reserved + rows > lane.max_rows:
            return True
        return self._reserved > 0 and self._reserved + rows > self._free_rows() > 0

    def _expected(self, records: int) -> int:
        """Return the expected number of rows of `records` records.

        The result is at least the number of rows of one record, and at most that of a response of maximum size.
        """
        if not self._records:
            return self._max_rows // _SPARE_SHARE
        per_record = self._rows // self._records
        return max(per_record, min(max(1, records) * self._rows // self._records, self._max_response_rows()))

    def _max_response_rows(self) -> int:
        """Return the expected number of rows in a response of the maximum size."""
        return self._max_bytes * self._rows // self._bytes if self._bytes else self._max_rows

    def _bytes_of(self, rows: int) -> int:
        """Return the expected number of bytes of `rows` rows, at most the maximum size of a response."""
        return max(1, min(rows * self._bytes // self._rows, self._max_bytes)) if self._rows else self._max_bytes

    async def _wait_in(self, lane: _Lane) -> None:
        turn = asyncio.get_running_loop().create_future()
        lane.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            self._wake_next()  # this poll may have been woken already
            raise

    def _wake_next(self) -> None:
        """Wake the longest waiting poll of healthy ranks and that of failing ranks.

        Each woken poll wakes the next poll of its group after it has checked the capacity.
        """
        for lane in (self._healthy, self._failing):
            while lane.waiting:
                turn = lane.waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    break


DRAINING_POLL_SECONDS: Final = 0.2
POKE_SECONDS: Final = 0.25  # shortest interval of polls that pokes cause
_FAST_SHARE: Final = 0.25  # of the interval, while the ring is more than half full
_CALM_FILL: Final = 0.25  # up to this ring fill, the interval may be longer
_CALM_POLLS: Final = 2.5  # factor of the longer interval
_CALM_SHARE: Final = 0.5  # of the flush interval, its upper limit: ranks learn of a commit at their next poll
_VIEWED_SECONDS: Final = 2.0
"""Longest interval of polls of a run of which a page is open: its values must be on the page within 3 s."""

_GROUP_SIZE: Final = 32
"""Number of targets in a group that is polled at the same time.

From the second target of a group on, the code is already in the caches of the processor. Measured with 20 ranks: a poll
of four steps takes 2.8 ms of CPU time if targets are polled singly, and 1.5 ms in groups of seven. In another
measurement, a poll of five steps takes 1.3 ms in groups of seven, and 1.1 ms in one group of 20.
"""
_INLINE_BYTES: Final = 262_144  # decompressing a smaller body takes less time than waking a thread


class RecordSource(Protocol):
    """Source of records: a rank over HTTP, or the spool of an ended process. All methods may raise FetchError."""

    async def records(
        self, url: str, *, incarnation: str, after: int, committed: int, lease: str | None, max_bytes: int, notice: bool
    ) -> Answer:
        """Return the records after the sequence number `after`: up to `max_bytes` bytes, but at least one record.

        `committed` is the last committed sequence number; the rank may delete the records up to it. With a
        `notice` for the rank, the rank is asked to register immediately.
        """

    async def plan(self, url: str, plan_id: str) -> str:
        """Return the JSON text of the plan `plan_id`, which lists the tensors and statistics of a record."""


class RecordReceiver(Protocol):
    """Receiver of checked poll responses and of poll outcomes. Poll loops call all methods on the event loop."""

    poll_budget: PollBudget
    """The admission control of all poll loops, which limits the rows that their polls together request."""
    ordinals: Callable[[int], int]
    """Reserves a number of new ordinals and returns the first one: they number all records in the order of arrival."""

    def on_body(
        self, target: Target, body: ValidBody, plans: dict[str, PlanColumns], *, size: int, inflated: int
    ) -> None:
        """Add the rows of `body` to the batch, and move the cursor of `target` to the last record of `body`.

        The cursor is the last received sequence number. If one of these two actions fails, neither takes effect. `size`
        is the number of received bytes, and `inflated` the number of bytes after decompression.
        """

    def on_answer(self, target: Target) -> None:
        """Record that a poll of `target` succeeded, with or without records."""

    def on_failure(self, target: Target, error: FetchError) -> None:
        """Record that a poll of `target` failed with `error`."""

    def on_drained(self, target: Target) -> None:
        """Record that all records of `target` are committed and its process exits."""

    def on_replaced(self, target: Target, incarnation: str) -> None:
        """Record that another process, with this incarnation, responds at the address of `target`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Calculates the delays, in seconds, between the polls of a target.

    `targets` returns the number of polled targets. A rank whose ring is nearly empty is polled less often, because the
    cost of a poll hardly depends on the number of records.
    """

    poll_seconds: float
    max_backoff_seconds: float
    flush_after_seconds: float = 0.0
    targets: Callable[[], int] = lambda: 1
    is_viewed: Callable[[str], bool] = lambda _: False  # whether a page of a run is open

    calm_seconds: float = field(init=False)  # interval of the polls of a rank whose ring is nearly empty

    def __post_init__(self) -> None:
        calm = max(self.poll_seconds, min(_CALM_POLLS * self.poll_seconds, _CALM_SHARE * self.flush_after_seconds))
        object.__setattr__(self, "calm_seconds", calm)

    def offset(self, incarnation: str, interval: float) -> float:
        """Return the time in seconds from the beginning of each poll interval to the regular poll of the target.

        `interval` is the length of a poll interval in seconds. Targets are polled in groups that are spread evenly over
        the interval. The result is the same after a restart of the service.
        """
        groups = max(1, -(-self.targets() // _GROUP_SIZE))
        return int(_place(incarnation) * groups) / groups * interval

    def after_answer(self, target: Target, now: float) -> float:
        """Return the delay until the next poll, in seconds, if all published records of the rank have been received.

        The delay is usually the time until the next regular poll of the target. The delay is shorter if the ring is
        more than half full, or if the process is about to exit.
        """
        if target.health is Health.DRAINING and target.committed >= target.cursor:
            return min(DRAINING_POLL_SECONDS, self.poll_seconds)  # before that, it waits for a commit, which pokes
        if target.ring_fill > 0.5:
            return self.poll_seconds * _FAST_SHARE
        interval = self.poll_seconds
        if self.is_viewed(target.registration.run):
            interval = min(interval, _VIEWED_SECONDS)
        elif target.health is Health.UP and target.cursor >= 0 and target.ring_fill <= _CALM_FILL:
            interval = self.calm_seconds
        return interval - (now - self.offset(target.incarnation, interval)) % interval

    def after_failure(self, failures_in_row: int, jitter: float, retry_after: float | None) -> float:
        """Return the delay until the next poll, in seconds, after a failed poll.

        The delay doubles with each failure up to a limit and is shortened by up to half, depending on `jitter` (0 to
        1). The result is at least `retry_after` seconds.
        """
        longest = min(self.max_backoff_seconds, self.poll_seconds * 2.0 ** min(failures_in_row - 1, 16))
        return max(longest * (0.5 + 0.5 * jitter), retry_after or 0.0)


@functools.lru_cache(maxsize=4096)
def _place(incarnation: str) -> float:
    """Return a pseudo-random number in [0, 1) that depends only on `incarnation`."""
    digest = hashlib.sha256(incarnation.encode()).digest()
    return int.from_bytes(digest[:4], "big") / (1 << 32)


class TargetLoop:
    """Polls one target until its health is GONE: its process has exited or was declared dead."""

    def __init__(
        self,
        target: Target,
        source: RecordSource,
        plans: PlanCache,
        sink: RecordReceiver,
        pace: Pace,
        *,
        clock: Callable[[], float],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.target = target
        self._source = source
        self._plans = plans
        self._sink = sink
        self._pace = pace
        self._clock = clock
        self._jitter = jitter
        self._wake_up = WakeUp()
        self._extra_from = -math.inf  # earliest time of the next poll that a poke may cause
        self._context = RowContext(
            run=target.registration.run,
            attempt=target.attempt,
            rank=target.registration.rank,
            incarnation=target.incarnation,
        )

    def poke(self) -> None:
        """Poll immediately, also during a delay after a failure.

        Two polls that this method causes are at least 0.25 s apart.
        """
        self._wake_up.set()

    async def run(self) -> None:
        """Poll the target repeatedly until its health is GONE: its process has exited or was declared dead."""
        delay = self._pace.after_answer(self.target, self._clock())
        while not self.target.is_gone:
            await self._wait(delay)
            if not self.target.is_gone:  # it may have been declared dead during the wait
                delay = await self.poll_once()

    async def poll_once(self) -> float:
        """Poll the target once, and return the delay until the next poll in seconds."""
        target = self.target
        if self._sink.poll_budget.is_used_up:
            return self._pace.poll_seconds
        backlog, is_failing = target.head - target.cursor, target.failures_in_row > 0
        async with self._sink.poll_budget.reserved(backlog, is_failing=is_failing) as max_bytes:
            return await self._poll(max_bytes) if max_bytes else 0.0

    async def _poll(self, max_bytes: int) -> float:
        target = self.target
        started = self._clock()
        try:
            has_more = await self._request(max_bytes)
        except (FetchError, DecodeError, pa.ArrowException) as error:
            fault = error if isinstance(error, FetchError) else FetchError("garbage", str(error))
            target.failures_in_row += 1
            target.last_error = str(fault)
            if not target.is_gone:
                target.health = Health.FAILING
            self._sink.on_failure(target, fault)
            return self._pace.after_failure(target.failures_in_row, self._jitter(), fault.retry_after_seconds)
        finally:
            target.last_scrape = self._clock()
            target.last_scrape_seconds = target.last_scrape - started
        target.failures_in_row, target.last_error = 0, None
        return 0.0 if has_more else self._pace.after_answer(target, self._clock())

    async def _wait(self, seconds: float) -> None:
        due = self._clock() + seconds
        if await self._wake_up.wait(seconds):
            is_extra = self._extra_from < due
            await asyncio.sleep(max(0.0, min(self._extra_from, due) - self._clock()))
            if is_extra:
                self._extra_from = self._clock() + POKE_SECONDS
            self._wake_up.clear()

    async def _request(self, max_bytes: int) -> bool:
        """Send one request to the target and process the response; return whether the target has more records."""
        target = self.target
        answer = await self._source.records(
            target.registration.url,
            incarnation=target.incarnation,
            after=target.cursor,
            committed=target.committed,
            lease=target.lease,
            max_bytes=max_bytes,
            notice=target.has_notice,
        )
        match answer:
            case NothingNew(ring):
                self._update(ring)
                return False
            case Drained():
                target.health = Health.GONE
                self._sink.on_drained(target)
                return False
            case OtherProcess(incarnation):
                self._sink.on_replaced(target, incarnation)
                raise FetchError(
                    "replaced", f"another process, {incarnation}, now responds at {target.registration.url}"
                )
            case Body():
                await self._take(answer)
                return target.head > target.cursor

    async def _take(self, body: Body) -> None:
        target = self.target
        if len(body.data) <= _INLINE_BYTES:
            wire = open_stream(body.data)
        else:
            wire = await asyncio.to_thread(open_stream, body.data)
        if wire.num_rows != body.rows:
            raise FetchError("cut", f"the headers announce {body.rows} records, the body has {wire.num_rows}")
        ordinal = self._sink.ordinals(wire.num_rows)
        plans = {plan_id: await self._plan(plan_id) for plan_id in plan_ids(wire)}
        checked = check(wire, plans, self._context, after=target.cursor, first_ordinal=ordinal)
        if (checked.first, checked.last) != (body.first, body.last):
            raise FetchError(
                "cut",
                f"the headers announce seq {body.first} to {body.last}, the body has {checked.first} to {checked.last}",
            )
        self._sink.on_body(target, checked, plans, size=len(body.data), inflated=wire.get_total_buffer_size())
        self._update(body.ring)

    async def _plan(self, plan_id: str) -> PlanColumns:
        if (plan := self._plans.get(plan_id)) is not None:
            return plan
        async with self._plans.requests:
            if (plan := self._plans.get(plan_id)) is not None:  # received from another rank meanwhile
                return plan
            text = await self._source.plan(self.target.registration.url, plan_id)
            return self._plans.add(plan_id, text)

    def _update(self, ring: RingStatus) -> None:
        target = self.target
        target.head = max(target.head, target.cursor, -1 if ring.head is None else ring.head)
        if not target.is_dead and ring.head is not None:
            target.expected = ring.head + ring.queued
        target.ring_fill = ring.ring_fill
        target.health = Health.DRAINING if ring.is_draining else Health.UP
        self._sink.on_answer(target)
