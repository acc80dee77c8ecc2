"""The view `desync`: ranks with different hashes of equal tensors, over hand-written rows."""

from __future__ import annotations

import functools

import pytest
from tests.storage import rows as given
from tests.storage.rows import ask


@pytest.fixture
def put(writer):
    """Append hashes given as (rank, step, tensor, hash); other columns by name."""

    def append(*rows, **columns) -> None:
        names = ("rank", "step", "tensor", "hash")
        listed = [dict(zip(names, row, strict=True), ordinal=place) for place, row in enumerate(rows)]
        common = {"run": "r", "attempt": 0, "kind": "param_after", "replicas": "0-2", **columns}
        given.put(writer, "hashes", listed, **common)

    return append


@pytest.fixture
def rows(connection):
    return functools.partial(
        ask, connection, "SELECT step, tensor, hashes, ranks, apart, majority FROM desync ORDER BY ALL"
    )


def test_ranks_that_differ_from_the_majority_are_named(put, rows):
    put((0, 5, "a", 7), (1, 5, "a", -8), (2, 5, "a", 7), (0, 5, "b", 1), (1, 5, "b", 1), (2, 5, "b", 1))

    assert [(5, "a", 2, 3, [1], 7)] == rows()


@pytest.mark.parametrize("hashes", [(7, 8), (7, 8, 9), (7, 7, 8, 8)])
def test_without_a_majority_all_ranks_are_named(put, rows, hashes):
    put(*((rank, 5, "a", hash_) for rank, hash_ in enumerate(hashes)))

    assert [(5, "a", len(set(hashes)), len(hashes), list(range(len(hashes))), None)] == rows()


def test_equal_hashes_of_replicas_give_no_row(put, rows):
    """Hybrid sharding: ranks 0 and 2 have one shard, 1 and 3 the other. A repeated step counts with its last hashes."""
    put(*((rank, step, tensor, 7) for rank in range(3) for step in (1, 2) for tensor in "bc"))
    put((0, 1, "a", 7), (2, 1, "a", 7), replicas="0,2")
    put((1, 1, "a", 9), (3, 1, "a", 9), replicas="1,3")
    put((0, 1, "a", 5), (2, 1, "a", 5), replicas="0,2", attempt=1)  # another training
    put((0, 1, "d", 7), (1, 1, "d", 8), (0, 1, "d", 9), (1, 1, "d", 9))

    assert [] == rows()


def test_norms_have_the_range_over_the_ranks(put, connection):
    put((0, 1, "a", 7), norm=2.0)
    put((1, 1, "a", 8), norm=2.5)

    assert [(2.0, 2.5)] == ask(connection, "SELECT norm_min, norm_max FROM desync")
