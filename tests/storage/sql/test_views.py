"""`tensor_global` combines shards and counts replicas once."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect


def row(**columns) -> dict:
    identity = {"run": "r", "attempt": 0, "rank": 0, "incarnation": "i", "seq": 0, "step": 1}
    tensor = {"kind": "grad_reduced", "tensor": "w", "placement": "full"}
    values = {"norm": 1.0, "min": -1.0, "max": 1.0, "mean": 0.0, "nans": 0, "infs": 0, "zeros": 0, "numel": 4}
    return {**identity, **tensor, **values, **columns}


def append(writer, rows: list[dict]) -> None:
    writer.append(
        Batch(
            tables={"tensor_stats": pa.Table.from_pylist(rows, schema=dataset_schema("tensor_stats"))},
            watermarks={"i": max(row["seq"] for row in rows)},
        )
    )


def combined(connection) -> list[dict]:
    return connection.query("FROM tensor_global ORDER BY ALL").to_pylist()


def statistics(values: np.ndarray) -> dict:
    """Return the reference: the statistics that the exporter publishes for one tensor or shard."""
    finite = values[np.isfinite(values)]
    return {
        "norm": float(np.sqrt(np.sum(finite**2))) if finite.size else None,
        "min": float(finite.min()) if finite.size else None,
        "max": float(finite.max()) if finite.size else None,
        "mean": float(finite.mean()) if finite.size else None,
        "nans": int(np.isnan(values).sum()),
        "infs": int(np.isinf(values).sum()),
        "zeros": int((values == 0).sum()),
        "numel": int(values.size),
    }


def assert_same(expected: dict, found: dict) -> None:
    for name, value in expected.items():
        if not isinstance(value, float):
            assert value == found[name], name
        else:
            assert value == pytest.approx(found[name], rel=1e-5, abs=1e-5), name


NUMBERS = st.lists(
    st.one_of(st.floats(-1e3, 1e3, width=32), st.sampled_from([math.nan, math.inf, 0.0])), min_size=1, max_size=6
)


@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(NUMBERS, min_size=1, max_size=4), st.integers(1, 2))
def test_shards_combine_to_the_statistics_of_the_whole_tensor(tmp_path_factory, shards, copies):
    """With hybrid sharding, several groups each contain all shards."""
    rows = []
    for copy in range(copies):
        for number, shard in enumerate(shards):
            rank = copy * len(shards) + number
            rows.append(row(placement="shard", shard_group=f"group-{copy}", rank=rank, **statistics(np.array(shard))))
    store = Store.open(tmp_path_factory.mktemp("store"), create=True)
    with store.claim(owner="me") as writer, connect(store.root) as connection:
        append(writer, rows)
        (found,) = combined(connection)

    assert len(rows) == found["parts"]
    assert_same(statistics(np.concatenate([np.array(shard) for shard in shards])), found)


def test_replicas_count_once(writer, connection):
    append(writer, [row(rank=rank, norm=2.0, zeros=1) for rank in range(4)])
    (found,) = combined(connection)

    assert_same({"parts": 4, "norm": 2.0, "numel": 4, "zeros": 1, "placement": "full"}, found)


def test_nan_on_any_replica_is_visible(writer, connection):
    append(writer, [row(rank=0), row(rank=1, nans=2, infs=1)])
    (found,) = combined(connection)

    assert_same({"nans": 2, "infs": 1, "numel": 4}, found)


def test_steps_kinds_tensors_heads_and_micro_steps_are_separate(writer, connection):
    keys = {"step": 2, "kind": "param_after", "tensor": "v", "index": 0, "micro_step": 0, "vpp_stage": 1, "call_seq": 3}
    variants = [{}, {"attempt": 1}, *({name: value} for name, value in keys.items())]
    append(writer, [row(**variant) for variant in variants])

    assert [1] * len(variants) == [found["parts"] for found in combined(connection)]


def test_tensor_without_finite_elements_has_no_norm(writer, connection):
    nothing = {"norm": None, "min": None, "max": None, "mean": None, "nans": 4}
    append(writer, [row(placement="shard", shard_group="g", rank=rank, **nothing) for rank in range(2)])
    (found,) = combined(connection)

    assert (None, None, 8, 8) == (found["norm"], found["mean"], found["nans"], found["numel"])


@pytest.mark.parametrize("placement", ["full", "shard"])
def test_step_measured_twice_in_an_attempt_counts_with_its_last_rows(writer, connection, placement):
    group = "g" if placement == "shard" else None
    append(
        writer,
        [
            row(placement=placement, shard_group=group, rank=rank, seq=seq, ts=10 - seq, norm=norm, nans=nans)
            for rank in range(2)
            for seq, norm, nans in ((4, 100.0, 3), (9, 3.0, 0), (7, 50.0, 1))
        ],
    )
    (found,) = combined(connection)

    whole = {"norm": math.sqrt(18), "numel": 8} if placement == "shard" else {"norm": 3.0, "numel": 4}
    assert_same({"parts": 2, "nans": 0, **whole}, found)


def test_complete_group_of_shards_is_preferred(writer, connection):
    """In group a, first in alphabetical order, one rank has no row."""
    append(
        writer,
        [
            row(placement="shard", shard_group=group, rank=rank, norm=3.0)
            for rank, group in enumerate(["a", "b", "b", "c"])
        ],
    )
    (found,) = combined(connection)

    assert_same({"parts": 4, "norm": math.sqrt(18), "numel": 8}, found)


def test_non_finite_counts_include_every_group_of_shards(writer, connection):
    counts = {"a": (0, 1), "b": (2, 0)}
    append(
        writer,
        [
            row(placement="shard", shard_group=group, rank=2 * position + part, nans=nans, infs=infs)
            for position, (group, (nans, infs)) in enumerate(counts.items())
            for part in range(2)
        ],
    )
    (found,) = combined(connection)

    assert_same({"nans": 4, "infs": 2, "numel": 8}, found)


def test_whole_copy_is_not_added_to_shards(writer, connection):
    append(
        writer,
        [
            *(row(placement="shard", shard_group="g", rank=rank, norm=3.0, numel=2) for rank in range(2)),
            row(rank=2, norm=5.0, numel=4),
        ],
    )
    (found,) = combined(connection)

    assert_same({"parts": 3, "numel": 4, "norm": math.sqrt(18)}, found)
