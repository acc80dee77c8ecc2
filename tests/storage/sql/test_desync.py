"""The view `desync`: ranks with different hashes of equal tensors, over hand-written rows."""

from __future__ import annotations

import pyarrow as pa
import pytest

from rankscope_storage.api.store import Batch
from rankscope_storage.base.schema import dataset_schema


@pytest.fixture
def put(writer):
    """Append hashes given as (rank, step, tensor, hash); other columns by name."""

    def append(*rows, **columns) -> None:
        common = {"run": "r", "attempt": 0, "kind": "param_after", "replicas": "0-2", **columns}
        named = [
            {**common, "rank": rank, "step": step, "tensor": tensor, "hash": hash_, "ordinal": number}
            for number, (rank, step, tensor, hash_) in enumerate(rows)
        ]
        table = pa.Table.from_pylist(named, schema=dataset_schema("hashes"))
        writer.append(Batch(tables={"hashes": table}, watermarks={}))

    return append


def rows(connection, columns="step, tensor, hashes, ranks, apart, majority"):
    return [tuple(row.values()) for row in connection.query(f"SELECT {columns} FROM desync ORDER BY ALL").to_pylist()]


def test_equal_hashes_give_no_row(put, connection):
    put(*((rank, step, tensor, 7) for rank in range(3) for step in (1, 2) for tensor in "ab"))

    assert [] == rows(connection)


def test_ranks_that_differ_from_the_majority_are_named(put, connection):
    put((0, 5, "a", 7), (1, 5, "a", -8), (2, 5, "a", 7), (0, 5, "b", 1), (1, 5, "b", 1), (2, 5, "b", 1))

    assert [(5, "a", 2, 3, [1], 7)] == rows(connection)


@pytest.mark.parametrize("hashes", [(7, 8), (7, 8, 9), (7, 7, 8, 8)])
def test_without_a_majority_all_ranks_are_named(put, connection, hashes):
    put(*((rank, 5, "a", hash_) for rank, hash_ in enumerate(hashes)))

    assert [(5, "a", len(set(hashes)), len(hashes), list(range(len(hashes))), None)] == rows(connection)


def test_replicas_of_other_shards_are_not_compared(put, connection):
    """Hybrid sharding: ranks 0 and 2 have one shard, 1 and 3 the other. Another attempt is another training."""
    put((0, 1, "a", 7), (2, 1, "a", 7), replicas="0,2")
    put((1, 1, "a", 9), (3, 1, "a", 9), replicas="1,3")
    put((0, 1, "a", 5), (2, 1, "a", 5), replicas="0,2", attempt=1)

    assert [] == rows(connection)


def test_repeated_step_counts_with_its_last_hashes(put, connection):
    put((0, 1, "a", 7), (1, 1, "a", 8), (0, 1, "a", 9), (1, 1, "a", 9))

    assert [] == rows(connection)


def test_norms_have_the_range_over_the_ranks(put, connection):
    put((0, 1, "a", 7), norm=2.0)
    put((1, 1, "a", 8), norm=2.5)

    assert [(2.0, 2.5)] == rows(connection, "norm_min, norm_max")
