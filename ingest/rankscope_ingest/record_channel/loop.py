"""Read one rank: poll, check, hand over. One asyncio task per target, so a slow rank delays no other.

The cursor moves together with the rows into the batch, and `committed` is passed back only after the store has them.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa

from rankscope_ingest.base.background import WakeUp
from rankscope_ingest.base.errors import DecodeError, FetchError
from rankscope_ingest.record_channel.admission import PollBudget
from rankscope_ingest.record_channel.arrow_guard import open_stream
from rankscope_ingest.record_channel.client import Answer, Body, Drained, NothingNew, OtherProcess, RingStatus
from rankscope_ingest.record_channel.plans import PlanCache, PlanColumns
from rankscope_ingest.record_channel.validate import RowContext, ValidBody, check, plan_ids
from rankscope_ingest.runs.target import Health, Target

DRAINING_POLL_SECONDS: Final = 0.2
POKE_SECONDS: Final = 0.25  # between two polls out of turn: whoever pokes without end does not get polls without end
_FAST_SHARE: Final = 0.25  # of the interval, while the ring is more than half full
_CALM_FILL: Final = 0.25  # a ring that is no fuller may wait for longer
_CALM_POLLS: Final = 2.5  # so many intervals
_CALM_SHARE: Final = 0.5  # of the time until a flush, and no longer: a record is told of as durable one poll later
_TOGETHER: Final = 32
"""Targets that are polled in one go. All that is done for the second of them finds its code in the processor's caches:
with 20 ranks, a poll of four steps costs 2.8 ms of CPU where each stands alone, and 1.5 where seven stand together. In
other runs, with all else that the loop does, polls of five steps cost 1.3 ms in groups of seven, and 1.1 where all 20
stand together."""
_INLINE_BYTES: Final = 262_144  # a small body is inflated faster than a thread is woken


class Source(Protocol):
    """Where records come from: ranks over HTTP, or what they left on a disk. Both raise FetchError."""

    async def records(
        self, url: str, *, incarnation: str, after: int, committed: int, lease: str | None, max_bytes: int
    ) -> Answer:
        """Return `max_bytes` of the records of a process after the cursor, or one; pass on what is committed."""
        ...

    async def plan(self, url: str, plan_id: str) -> str:
        """Return the text of a plan."""
        ...


class Sink(Protocol):
    """The service as a loop sees it. All methods are called on the event loop."""

    @property
    def is_full(self) -> bool:
        """Whether pulling has to wait for the store."""
        ...

    @property
    def room(self) -> PollBudget:
        """What bodies that are asked for may fill."""
        ...

    def ordinals(self, count: int) -> int:
        """Return the first of `count` new arrival numbers."""
        ...

    def on_body(
        self, target: Target, body: ValidBody, plans: dict[str, PlanColumns], *, size: int, inflated: int
    ) -> None:
        """Take the rows of one body, of `size` bytes on the wire, and move the cursor behind it, both or neither."""
        ...

    def on_answer(self, target: Target) -> None:
        """Note any usable answer."""
        ...

    def on_failure(self, target: Target, error: FetchError) -> None:
        """Note a poll that brought nothing."""
        ...

    def on_drained(self, target: Target) -> None:
        """Note that the rank ends, with everything committed."""
        ...

    def on_replaced(self, target: Target, incarnation: str) -> None:
        """Note that another process answers at the target's address."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often to poll, in seconds."""

    poll_seconds: float
    max_backoff_seconds: float
    calm_seconds: float = 0.0  # where the ring has room: a poll costs the same, however many records it brings
    targets: Callable[[], int] = lambda: 1  # how many are polled at this pace

    @classmethod
    def of(
        cls,
        *,
        poll_seconds: float,
        max_backoff_seconds: float,
        flush_after_seconds: float,
        targets: Callable[[], int] = lambda: 1,
    ) -> Pace:
        """Return the pace of a service that flushes after so long."""
        calm = min(_CALM_POLLS * poll_seconds, _CALM_SHARE * flush_after_seconds)
        return cls(
            poll_seconds=poll_seconds, max_backoff_seconds=max_backoff_seconds, calm_seconds=calm, targets=targets
        )

    def offset(self, incarnation: str, interval: float) -> float:
        """Return when within the interval this target is polled: in small groups, spread, and alike after a restart."""
        groups = max(1, -(-self.targets() // _TOGETHER))
        return int(_place(incarnation) * groups) / groups * interval

    def after_answer(self, target: Target, now: float) -> float:
        """Return how long to wait after an answer without more to come: to the target's own tick, or less."""
        if target.health is Health.DRAINING and target.committed >= target.cursor:
            return min(DRAINING_POLL_SECONDS, self.poll_seconds)  # until then it waits for a commit, which pokes
        if target.ring_fill > 0.5:
            return self.poll_seconds * _FAST_SHARE
        interval = max(self.calm_seconds, self.poll_seconds) if _is_calm(target) else self.poll_seconds
        return interval - (now - self.offset(target.incarnation, interval)) % interval

    def after_failure(self, failures_in_row: int, jitter: float, asked_to_wait: float | None) -> float:
        """Return how long to wait: doubling, capped, spread by `jitter` (0 … 1), at least what the rank asked for."""
        longest = min(self.max_backoff_seconds, self.poll_seconds * 2.0 ** min(failures_in_row - 1, 16))
        return max(longest * (0.5 + 0.5 * jitter), asked_to_wait or 0.0)


@functools.lru_cache(maxsize=4096)
def _place(incarnation: str) -> float:
    """Return a number from 0 up to 1, another one for each process."""
    digest = hashlib.sha256(incarnation.encode()).digest()
    return int.from_bytes(digest[:4], "big") / (1 << 32)


def _is_calm(target: Target) -> bool:
    return target.health is Health.UP and target.cursor >= 0 and target.ring_fill <= _CALM_FILL


class TargetLoop:
    """Polls one target until it is gone."""

    def __init__(
        self,
        target: Target,
        source: Source,
        plans: PlanCache,
        sink: Sink,
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
        self._alarm = WakeUp()
        self._extra_from = -math.inf  # no poll out of turn before this moment
        self._context = RowContext(
            run=target.registration.run,
            attempt=target.attempt,
            rank=target.registration.rank,
            incarnation=target.incarnation,
        )

    def poke(self) -> None:
        """Poll out of turn, at once unless that was done just before; also while the target is backed off from."""
        self._alarm.set()

    async def run(self) -> None:
        """Poll until the target is gone."""
        delay = self._pace.after_answer(self.target, self._clock())
        while not self.target.is_gone:
            await self._wait(delay)
            if not self.target.is_gone:  # it may have been taken for dead while we waited
                delay = await self.poll_once()

    async def poll_once(self) -> float:
        """Poll once, and return after how many seconds to do so again."""
        target = self.target
        if self._sink.is_full:
            return self._pace.poll_seconds
        behind, is_doubtful = target.head - target.cursor, target.failures_in_row > 0
        async with self._sink.room.taken(behind, is_doubtful=is_doubtful) as max_bytes:
            return await self._ask(max_bytes) if max_bytes else 0.0

    async def _ask(self, max_bytes: int) -> float:
        target = self.target
        started = self._clock()
        try:
            more = await self._poll_once(max_bytes)
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
        return 0.0 if more else self._pace.after_answer(target, self._clock())

    async def _wait(self, seconds: float) -> None:
        due = self._clock() + seconds
        if await self._alarm.wait(seconds):
            is_extra = self._extra_from < due
            await asyncio.sleep(max(0.0, min(self._extra_from, due) - self._clock()))
            if is_extra:
                self._extra_from = self._clock() + POKE_SECONDS
            self._alarm.clear()

    async def _poll_once(self, max_bytes: int) -> bool:
        """Ask once and act on the answer; return whether more is waiting on the rank."""
        target = self.target
        answer = await self._source.records(
            target.registration.url,
            incarnation=target.incarnation,
            after=target.cursor,
            committed=target.committed,
            lease=target.lease,
            max_bytes=max_bytes,
        )
        match answer:
            case NothingNew(standing):
                self._note(standing)
                return False
            case Drained():
                target.health = Health.GONE
                self._sink.on_drained(target)
                return False
            case OtherProcess(incarnation):
                self._sink.on_replaced(target, incarnation)
                raise FetchError("replaced", f"process {incarnation} answers at {target.registration.url} now")
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
            raise FetchError("cut", f"{body.rows} records were promised, {wire.num_rows} arrived")
        ordinal = self._sink.ordinals(wire.num_rows)
        plans = {plan_id: await self._plan(plan_id) for plan_id in plan_ids(wire)}
        checked = check(wire, plans, self._context, after=target.cursor, first_ordinal=ordinal)
        if (checked.first, checked.last) != (body.first, body.last):
            raise FetchError(
                "cut", f"seq {body.first} to {body.last} was promised, {checked.first} to {checked.last} came"
            )
        self._sink.on_body(target, checked, plans, size=len(body.data), inflated=wire.get_total_buffer_size())
        self._note(body.standing)

    async def _plan(self, plan_id: str) -> PlanColumns:
        known = self._plans.get(plan_id)
        if known is not None:
            return known
        async with self._plans.asking:
            known = self._plans.get(plan_id)  # another rank may have given it meanwhile
            if known is not None:
                return known
            text = await self._source.plan(self.target.registration.url, plan_id)
            return self._plans.add(plan_id, text)

    def _note(self, standing: RingStatus) -> None:
        target = self.target
        target.head = max(target.head, target.cursor, -1 if standing.head is None else standing.head)
        target.ring_fill = standing.ring_fill
        target.health = Health.DRAINING if standing.is_draining else Health.UP
        self._sink.on_answer(target)
