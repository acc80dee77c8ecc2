"""What a message has of bytes, by hand for each operation as torch records it; spans of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract.diagnostics.collective_format import (
    MOST_RANKS,
    bytes_text,
    dtype_text,
    is_even,
    message_bytes,
    ranks_in,
    spans,
)

F, L = ["Float"], ["Long"]


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "count"),
    [
        # Two ranks, three floats of each: as gloo records them, on rank 0.
        ("all_reduce", ([[3]], F), ([[3]], F), 12),
        ("broadcast", ([[3]], F), ([[3]], F), 12),
        ("reduce", ([[3]], F), ([[3]], F), 12),
        ("all_gather", ([[3]], F), ([[2, 3]], F), 24),  # the whole that is gathered
        ("reduce_scatter", ([[2, 3]], F), ([[3]], F), 24),  # the whole that is reduced
        ("gather", ([[3]], F), ([[2, 3]], F), 24),  # at its destination; elsewhere 12
        ("gather", ([[3]], F), ([], []), 12),
        ("scatter", ([[2, 3]], F), ([[3]], F), 24),  # at its source; elsewhere 12
        ("all_to_all", ([[2], [1]], ["Float", "Float"]), ([[2], [2]], ["Float", "Float"]), 16),
        ("send", ([[3]], F), ([[3]], F), 12),
        ("all_reduce of several", ([[4], [6]], ["BFloat16", "Long"]), ([[4], [6]], ["BFloat16", "Long"]), 56),
        ("all_reduce of a scalar", ([[]], L), ([[]], L), 8),
        ("all_reduce of nothing", ([[0]], F), ([[0]], F), 0),
        ("barrier", ([], []), ([], []), None),
        ("a type that is new", ([[3]], ["Float3"]), ([[3]], F), None),
    ],
)
def test_bytes_are_those_of_the_larger_side(op, inputs, outputs, count):
    assert count == message_bytes(*inputs, *outputs), op


def test_types_are_named_as_in_python_each_once():
    assert "bfloat16, int64" == dtype_text(["BFloat16", "Long", "BFloat16"])
    assert "float3" == dtype_text(["Float3"])
    assert None is dtype_text([])


@pytest.mark.parametrize(
    ("op", "even"),
    [("all_reduce", True), ("_all_gather_base", True), ("_reduce_scatter_base", True), ("gather", False),
     ("all_to_all", False), ("scatter", False), ("send 0->1", False)],
)  # fmt: skip
def test_of_some_operations_every_rank_moves_as_much(op, even):
    assert even is is_even(op)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (4 << 20, "4.0 MiB"), (3 << 39, "1.5 TiB")]
)
def test_sizes_are_written_for_people(count, text):
    assert text == bytes_text(count)


@given(st.sets(st.integers(0, 60)))
def test_spans_name_ranks_and_come_back(ranks):
    assert tuple(sorted(ranks)) == ranks_in(spans(ranks))


def test_spans_are_as_short_as_can_be():
    assert "0-2,5" == spans([5, 0, 2, 1, 1])


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1,,2", f"0-{MOST_RANKS}"])
def test_what_names_no_ranks_is_refused(text):
    with pytest.raises(ValueError):
        ranks_in(text)
