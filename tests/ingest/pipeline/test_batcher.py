"""The batcher: when a batch is due, its content, and the limit of pending rows."""

from __future__ import annotations

import math

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope_ingest.pipeline.batcher import SOON_SECONDS, Batcher


def batcher(**changes):
    return Batcher(**({"flush_rows": 10, "flush_after_seconds": 5.0, "max_pending_rows": 20} | changes))


def table(*values):
    return pa.table({"x": list(values)})


def test_batch_is_due_by_rows_by_age_and_on_demand():
    """A request to flush an empty batch does not affect the next one."""
    by_rows, by_age, wanted, early = batcher(), batcher(), batcher(), batcher()
    early.want_flush()
    empty = early.due(1e9)
    by_rows.add({"scalars": table(*range(10))}, 0.0)
    for one in (by_age, wanted, early):
        one.add({"scalars": table(1)}, 0.0)
    wanted.want_flush()

    assert [None, None, "rows", "wanted"] == [empty, early.due(0.0), by_rows.due(0.0), wanted.due(0.0)]
    assert [None, "age"] == [by_age.due(4.9), by_age.due(5.0)]


def filling(rows, seconds):
    """Return a batcher whose previous batch gathered `rows` in `seconds`, and whose current one started at 0."""
    queue = batcher(flush_rows=100, flush_after_seconds=60.0, max_pending_rows=1000)
    queue.add({"scalars": table(*range(rows))}, -seconds)
    queue.release(queue.take())
    queue.add({"scalars": table(1)}, 0.0)
    queue.want_flush()
    return queue


def test_requested_flush_waits_for_a_batch_that_is_full_within_two_seconds():
    soon, later = filling(100, 1.9), filling(100, 2.1)

    assert [None, "wanted"] == [soon.due(0.0), later.due(0.0)]
    soon.add({"scalars": table(*range(99))}, 1.9)
    assert "rows" == soon.due(1.9)


def test_requested_flush_waits_at_most_two_seconds():
    stopped = filling(100, 0.5)

    assert [None, None, "wanted"] == [stopped.due(0.0), stopped.due(1.9), stopped.due(2.0)]
    stopped.take()
    stopped.add({"scalars": table(1)}, 3.0)
    stopped.want_flush()
    assert "wanted" == stopped.due(3.0)  # by then it is known that they fill no more


def test_rest_seconds_returns_the_time_until_a_batch_is_due():
    empty, by_age, wanted = batcher(), batcher(), filling(100, 0.5)
    by_age.add({"scalars": table(1)}, 1.0)

    assert [math.inf, 5.0, 0.5, -1.0] == [
        empty.rest_seconds(9.0),
        by_age.rest_seconds(1.0),
        by_age.rest_seconds(5.5),
        by_age.rest_seconds(7.0),
    ]
    by_age.add({"scalars": table(*range(10))}, 1.0)
    assert 0.0 == by_age.rest_seconds(1.0)  # the flusher may not have had time after the notification
    assert wanted.due(0.0) is None
    assert 0 < wanted.rest_seconds(0.0) < SOON_SECONDS


def test_flusher_is_notified_when_a_batch_starts_is_full_or_is_wanted():
    reasons = []
    queue = batcher()
    queue.notify(lambda: reasons.append(queue.due(0.0)))
    queue.want_flush()
    queue.add({}, 0.0)
    queue.add({"scalars": table(1)}, 0.0)
    queue.add({"scalars": table(2)}, 0.0)
    queue.want_flush()
    queue.take()
    queue.add({"scalars": table(*range(9))}, 0.0)
    queue.add({"scalars": table(9)}, 0.0)

    assert [None, "wanted", None, "rows"] == reasons


def test_watermark_without_rows_is_flushed():
    idle = batcher()
    idle.add({}, 0.0, watermarks={"a": 3})

    assert "age" == idle.due(5.0)
    assert {"a": 3} == idle.take().watermarks


def test_rows_received_while_a_batch_is_in_flight_form_the_next_one():
    """Rows count as pending until their commit."""
    busy = batcher(max_pending_rows=2)
    busy.add({"scalars": table(1)}, 0.0, watermarks={"a": 1, "b": 1})
    first = busy.take()
    busy.add({"scalars": table(2)}, 1.0, watermarks={"a": 2})
    second = busy.take()
    before = (busy.pending_rows, busy.is_full)
    busy.release(first)

    assert [[1], [2]] == [batch.tables()["scalars"]["x"].to_pylist() for batch in (first, second)]
    assert [{"a": 1, "b": 1}, {"a": 2}] == [first.watermarks, second.watermarks]
    assert [(2, True), (1, False)] == [before, (busy.pending_rows, busy.is_full)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "take", "settle"]), st.integers(0, 4)), max_size=40))
def test_no_row_is_lost_or_duplicated(actions):
    """Rows are returned in order, each exactly once, and the number of pending rows is always right."""
    queue, next_row, stored, taken = batcher(), 0, [], []
    for action, size in actions:
        if action == "add":
            rows = list(range(next_row, next_row + size))
            next_row += size
            queue.add({"scalars": pa.table({"x": pa.array(rows, pa.int64())})}, 0.0, watermarks={"a": next_row})
        elif action == "take" and not taken:
            taken.append(queue.take())
        elif action == "settle" and taken:
            batch = taken.pop()
            stored += batch.tables().get("scalars", table())["x"].to_pylist() if batch.rows else []
            queue.release(batch)
        assert next_row - len(stored) == queue.pending_rows
    for rest in (*taken, queue.take()):
        stored += rest.tables()["scalars"]["x"].to_pylist() if rest.rows else []

    assert list(range(next_row)) == stored
