"""Rows that are new by their watermarks, and rows that a batch may not contain, compared with a simple reference."""

from __future__ import annotations

import contextlib

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope_storage.base.errors import BatchError
from rankscope_storage.writer.writer import check_covered, newer

ROWS = st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 4) | st.none()), max_size=6)
LIMITS = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(-1, 5))


def table(rows: list[tuple[str | None, int | None]], *, coded: bool) -> pa.Table:
    names = pa.array([name for name, _ in rows], pa.string())
    seqs = pa.array([seq for _, seq in rows], pa.int64())
    return pa.table({"incarnation": names.dictionary_encode() if coded else names, "seq": seqs})


def is_beyond(row: tuple[str | None, int | None], limits: dict[str, int]) -> bool:
    name, seq = row
    return name is not None and seq is not None and seq > limits.get(name, -1)


@settings(deadline=None)  # the first example loads the compute functions of Arrow
@given(ROWS, LIMITS, st.booleans())
def test_newer_drops_rows_up_to_the_watermark_of_their_incarnation(rows, stored, coded):
    stored = {"a": -1, "b": -1, **stored}
    fresh = [row for row in rows if None in row or is_beyond(row, stored)]

    assert fresh == [tuple(row.values()) for row in newer(table(rows, coded=coded), stored).to_pylist()]


@settings(deadline=None)  # the first example loads the compute functions of Arrow
@given(ROWS, LIMITS, st.booleans())
def test_check_covered_refuses_rows_above_the_batch_watermark(rows, watermarks, coded):
    refused = True
    with contextlib.suppress(BatchError):
        check_covered(table(rows, coded=coded), "events", watermarks)
        refused = False

    assert any(is_beyond(row, watermarks) for row in rows) == refused
