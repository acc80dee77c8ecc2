"""Groups of ranks in text, as ranks write them and the service reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract.protocol.rank_ranges import parse_ranks
from rankscope_exporter.adapters.placement import ranks_text


@given(st.sets(st.integers(0, 5000), min_size=1, max_size=12))
def test_what_a_rank_writes_is_read_back(ranks):
    assert tuple(sorted(ranks)) == parse_ranks(ranks_text(sorted(ranks)))


@pytest.mark.parametrize(
    ("text", "ranks"), [("3", (3,)), ("0,1", (0, 1)), ("0-3", (0, 1, 2, 3)), ("1-9:4", (1, 5, 9)), ("5,1", (1, 5))]
)
def test_ranges_with_and_without_a_step(text, ranks):
    assert ranks == parse_ranks(text)


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-4:0", "1,", "0-999999999", "-1", "0-3,5"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="no group of ranks"):
        parse_ranks(text)
