"""Tests of message sizes, dtype names and rank spans. Expected sizes are written by hand for each operation."""

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
    parse_ranks,
    ranks_in,
    spans,
)
from rankscope_exporter.adapters.placement import ranks_text

F, L = ["Float"], ["Long"]


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "count"),
    [
        # Two ranks with three floats each, as gloo records them on rank 0.
        ("all_reduce", ([[3]], F), ([[3]], F), 12),
        ("broadcast", ([[3]], F), ([[3]], F), 12),
        ("reduce", ([[3]], F), ([[3]], F), 12),
        ("all_gather", ([[3]], F), ([[2, 3]], F), 24),  # the gathered tensor
        ("reduce_scatter", ([[2, 3]], F), ([[3]], F), 24),  # the tensor before scattering
        ("gather", ([[3]], F), ([[2, 3]], F), 24),  # at the destination; 12 on other ranks
        ("gather", ([[3]], F), ([], []), 12),
        ("scatter", ([[2, 3]], F), ([[3]], F), 24),  # at the source; 12 on other ranks
        ("all_to_all", ([[2], [1]], ["Float", "Float"]), ([[2], [2]], ["Float", "Float"]), 16),
        ("send", ([[3]], F), ([[3]], F), 12),
        ("all_reduce of several", ([[4], [6]], ["BFloat16", "Long"]), ([[4], [6]], ["BFloat16", "Long"]), 56),
        ("all_reduce of a scalar", ([[]], L), ([[]], L), 8),
        ("all_reduce of nothing", ([[0]], F), ([[0]], F), 0),
        ("barrier", ([], []), ([], []), None),
        ("an unknown dtype", ([[3]], ["Float3"]), ([[3]], F), None),
    ],
)
def test_message_bytes_is_the_larger_of_input_and_output(op, inputs, outputs, count):
    assert count == message_bytes(*inputs, *outputs), op


def test_dtype_text_lists_each_python_name_once():
    assert "bfloat16, int64" == dtype_text(["BFloat16", "Long", "BFloat16"])
    assert "float3" == dtype_text(["Float3"])
    assert None is dtype_text([])


@pytest.mark.parametrize(
    ("op", "even"),
    [("all_reduce", True), ("_all_gather_base", True), ("_reduce_scatter_base", True), ("gather", False),
     ("all_to_all", False), ("scatter", False), ("send 0->1", False)],
)  # fmt: skip
def test_is_even_accepts_ops_with_equal_bytes_on_all_ranks(op, even):
    assert even is is_even(op)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (4 << 20, "4.0 MiB"), (3 << 39, "1.5 TiB")]
)
def test_bytes_text_uses_binary_units(count, text):
    assert text == bytes_text(count)


@given(st.sets(st.integers(0, 60)))
def test_ranks_in_is_the_inverse_of_spans(ranks):
    assert tuple(sorted(ranks)) == ranks_in(spans(ranks))
    assert "0-2,5" == spans([5, 0, 2, 1, 1])


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1,,2", f"0-{MOST_RANKS}"])
def test_ranks_in_rejects_other_text(text):
    with pytest.raises(ValueError):
        ranks_in(text)


@given(st.sets(st.integers(0, 5000), min_size=1, max_size=12))
def test_parse_ranks_is_the_inverse_of_the_ranks_in_a_placement(ranks):
    assert tuple(sorted(ranks)) == parse_ranks(ranks_text(sorted(ranks)))


@pytest.mark.parametrize(
    ("text", "ranks"), [("3", (3,)), ("0,1", (0, 1)), ("0-3", (0, 1, 2, 3)), ("1-9:4", (1, 5, 9)), ("5,1", (1, 5))]
)
def test_parse_ranks_accepts_a_list_a_range_and_a_step(text, ranks):
    assert ranks == parse_ranks(text)


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-4:0", "1,", "0-999999999", "-1", "0-3,5"])
def test_parse_ranks_rejects_other_text(text):
    with pytest.raises(ValueError, match="no group of ranks"):
        parse_ranks(text)
