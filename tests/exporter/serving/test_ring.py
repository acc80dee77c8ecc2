"""The ring: sequence numbers, limits, cursors, and the report of each lost record."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.records.step_record import Statistics, StepRecord
from rankscope_exporter.serving.config import MIN_RING_RECORDS
from rankscope_exporter.serving.ring import CursorError, Ring

EVERYTHING = 1 << 40


def _fill(ring: Ring, records: int, **more: Any) -> Ring:
    for step in range(records):
        ring.append(StepRecord(ts=step, step=step, **more))
    return ring


def _filled(records: int, *, room: int = 1024, max_bytes: int = EVERYTHING) -> Ring:
    return _fill(Ring(room, max_bytes), records)


def _steps(ring: Ring, after: int, max_bytes: int = EVERYTHING) -> list[int | None]:
    return [record.step for record in ring.after(after, max_bytes).records]


def test_empty_ring_refuses_a_cursor_above_the_head():
    ring = Ring(8, EVERYTHING)

    assert (-1, 0, 0, 0.0) == (ring.head, ring.first, ring.uncommitted, ring.fill)
    assert () == ring.after(-1, 1).records
    with pytest.raises(CursorError, match="above the sequence number of the newest record: -1"):
        ring.after(0, 1)
    assert [0, 1, 2] == [ring.append(StepRecord(ts=0)) for _ in range(3)]
    assert (2, 0, 3) == (ring.head, ring.first, len(ring))


def test_max_bytes_limits_the_window_to_at_least_one_record():
    ring = _filled(10)
    window = ring.after(-1, 3 * 256)

    assert (0, 2, 3) == (window.first, window.last, len(window.records))
    assert ([8, 9], [8]) == (_steps(ring, after=7), _steps(ring, after=7, max_bytes=1))


def test_overwritten_records_are_reported_and_counted():
    ring = _filled(12, room=8)
    window = ring.after(1, EVERYTHING)

    assert (2, 3) == window.lost
    assert list(range(4, 12)) == [record.step for record in window.records]
    assert 4 == ring.overrun
    ring.commit(9)  # its records are no loss
    _fill(ring, 8)
    assert 6 == ring.overrun


def test_committed_never_decreases_nor_exceeds_the_head():
    ring = _filled(5)
    ring.commit(3)
    ring.commit(1)
    with pytest.raises(CursorError, match="committed=5 is above the sequence number of the newest record: 4"):
        ring.commit(5)

    assert (3, 1) == (ring.committed, ring.uncommitted)


def test_byte_limit_applies_above_the_smallest_ring(statistics):
    big = statistics([PlanEntry(kind="grad_reduced", tensor=f"t{i}") for i in range(400)], [{"norm": 1.0}] * 400)
    ring = _fill(Ring(10_000, 1_000_000), MIN_RING_RECORDS + 50, statistics=big)
    small = _filled(1000, room=10_000, max_bytes=400 * 256)

    assert (MIN_RING_RECORDS, 50, 1.0) == (len(ring), ring.overrun, ring.fill)
    assert (400, 1.0) == (len(small), small.fill)
    small.commit(799)
    assert 0.5 == small.fill  # only of the records that are not overwritten


def test_fill_is_the_uncommitted_share_of_the_capacity():
    ring = _filled(400, room=800)
    assert 0.5 == ring.fill
    ring.commit(199)
    assert 0.25 == ring.fill


def test_statistics_that_do_not_match_their_plan_are_refused(statistics):
    good = statistics([PlanEntry(kind="grad_reduced", tensor="a")], [{"norm": 1.0}])
    ring = Ring(8, EVERYTHING)
    with pytest.raises(ValueError, match="plan of 1 entries needs 6 and 4"):
        ring.append(StepRecord(ts=0, statistics=Statistics(good.plan, good.values.slice(1), good.counts)))

    assert -1 == ring.head


def test_plan_is_kept_while_a_record_uses_it(statistics):
    ring = Ring(300, EVERYTHING)
    plans = []
    for step in range(400):
        numbers = statistics([PlanEntry(kind="act_out", tensor=f"t{step}")], [{"norm": 1.0}])
        plans.append(numbers.plan.hash)
        ring.append(StepRecord(ts=step, statistics=numbers))

    assert all(ring.plan(plan) is not None for plan in plans[-300:])
    assert ring.plan(plans[0]) is None


def test_wait_ends_when_all_records_are_committed_or_after_its_timeout():
    ring = _filled(5)
    commit = threading.Timer(0.05, ring.commit, [4])

    assert 5 == ring.wait_committed(0.01)
    commit.start()
    assert 0 == ring.wait_committed(10.0)


_operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 4)),
        st.tuples(st.just("fetch"), st.integers(1, 5 * 256)),
        st.tuples(st.just("commit"), st.floats(0, 1)),
    ),
    max_size=80,
)


@given(_operations)
def test_each_record_is_delivered_once_or_reported_as_lost(operations):
    """A reader that commits only received records can account for each record."""
    ring = Ring(5, EVERYTHING)
    published = 0
    cursor = -1
    delivered: list[int | None] = []
    lost: list[int] = []
    committed = -1
    overwritten_uncommitted = 0

    for name, argument in [*operations, ("fetch", EVERYTHING)]:
        if name == "append":
            for _ in range(argument):
                if published - 5 > committed and published >= 5:
                    overwritten_uncommitted += 1
                assert published == ring.append(StepRecord(ts=0, step=published))
                published += 1
        elif name == "fetch":
            window = ring.after(cursor, argument)
            if window.lost is not None:
                lost += range(window.lost[0], window.lost[1] + 1)
            delivered += [record.step for record in window.records]
            cursor = window.last
        else:
            committed = max(committed, int(argument * (cursor + 1)) - 1)
            ring.commit(committed)

    assert list(range(published)) == sorted([*delivered, *lost])
    assert delivered == sorted(delivered)
    assert overwritten_uncommitted == ring.overrun
    assert min(5, published - 1 - committed) == ring.uncommitted


def test_concurrent_readers_and_writer_lose_no_record():
    ring = Ring(100_000, EVERYTHING)
    records = 5000

    def read(_: int) -> list[int | None]:
        steps: list[int | None] = []
        cursor = -1
        while cursor < records - 1:
            window = ring.after(cursor, 20 * 256)
            steps += [record.step for record in window.records]
            cursor = window.last
            ring.commit(cursor)
        return steps

    with ThreadPoolExecutor(2) as threads:
        seen = threads.map(read, range(2))
        _fill(ring, records)

    assert [list(range(records))] * 2 == list(seen)
    assert 0 == ring.uncommitted
