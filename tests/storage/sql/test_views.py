"""`tensor_global` combines shards and counts replicas once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.properties import examples
from tests.storage.rows import put

from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect


def row(**columns) -> dict:
    identity = {"run": "r", "attempt": 0, "rank": 0, "incarnation": "i", "seq": 0, "step": 1}
    tensor = {"kind": "grad_reduced", "tensor": "w", "placement": "full"}
    values = {"norm": 1.0, "min": -1.0, "max": 1.0, "mean": 0.0, "nans": 0, "infs": 0, "zeros": 0, "numel": 4}
    return {**identity, **tensor, **values, **columns}


def shard_of(group: str, rank: int, **columns) -> dict:
    return row(placement="shard", shard_group=group, rank=rank, **columns)


def combined(writer, connection, rows: list[dict]) -> list[dict]:
    """Append `rows`; return all rows of `tensor_global`."""
    put(writer, "tensor_stats", rows, {"i": max(row["seq"] for row in rows)})
    return connection.query("FROM tensor_global ORDER BY ALL").to_pylist()


@pytest.fixture
def only(writer, connection):
    """Return a function that returns the only row of `tensor_global` for rows of `tensor_stats`."""

    def made(rows: list[dict]) -> dict:
        (found,) = combined(writer, connection, rows)
        return found

    return made


def statistics(values: np.ndarray) -> dict:
    """Return the reference: the statistics that the exporter publishes for one tensor or shard."""
    finite = values[np.isfinite(values)]
    counts = {"nans": np.isnan(values).sum(), "infs": np.isinf(values).sum(), "zeros": (values == 0).sum()}
    ops = {"norm": np.linalg.norm, "min": np.min, "max": np.max, "mean": np.mean}
    numbers = {name: float(op(finite)) if finite.size else None for name, op in ops.items()}
    return numbers | {name: int(count) for name, count in counts.items()} | {"numel": values.size}


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
    rows = [
        shard_of(f"group-{copy}", copy * len(shards) + number, **statistics(np.array(values)))
        for copy in range(copies)
        for number, values in enumerate(shards)
    ]
    store = Store.open(tmp_path_factory.mktemp("store"), create=True)
    with store.claim(owner="me") as writer, connect(store.root) as connection:
        (found,) = combined(writer, connection, rows)

    assert len(rows) == found["parts"]
    assert_same(statistics(np.concatenate([np.array(shard) for shard in shards])), found)


def test_replicas_count_once(only):
    found = only([row(rank=rank, norm=2.0, zeros=1) for rank in range(4)])

    assert_same({"parts": 4, "norm": 2.0, "numel": 4, "zeros": 1, "placement": "full"}, found)


def test_nan_on_any_replica_is_visible(only):
    assert_same({"nans": 2, "infs": 1, "numel": 4}, only([row(rank=0), row(rank=1, nans=2, infs=1)]))


def test_steps_kinds_tensors_heads_and_micro_steps_are_separate(writer, connection):
    keys = {"step": 2, "kind": "param_after", "tensor": "v", "index": 0, "micro_step": 0, "vpp_stage": 1, "call_seq": 3}
    variants = [{}, {"attempt": 1}, *({name: value} for name, value in keys.items())]
    found = combined(writer, connection, [row(**variant) for variant in variants])

    assert [1] * len(variants) == [one["parts"] for one in found]


def test_tensor_without_finite_elements_has_no_norm(only):
    nothing = {"norm": None, "min": None, "max": None, "mean": None, "nans": 4}
    found = only([shard_of("g", rank, **nothing) for rank in range(2)])

    assert (None, None, 8, 8) == (found["norm"], found["mean"], found["nans"], found["numel"])


@pytest.mark.parametrize("placement", ["full", "shard"])
def test_step_measured_twice_in_an_attempt_counts_with_its_last_rows(only, placement):
    made = {"placement": placement, "shard_group": "g" if placement == "shard" else None}
    told = ((4, 100.0, 3), (9, 3.0, 0), (7, 50.0, 1))
    found = only(
        [row(**made, rank=r, seq=s, ts=10 - s, norm=norm, nans=nans) for r in range(2) for s, norm, nans in told]
    )

    whole = {"norm": math.sqrt(18), "numel": 8} if placement == "shard" else {"norm": 3.0, "numel": 4}
    assert_same({"parts": 2, "nans": 0, **whole}, found)


def test_complete_group_of_shards_is_preferred(only):
    """In group a, first in alphabetical order, one rank has no row."""
    found = only([shard_of(group, rank, norm=3.0) for rank, group in enumerate("abbc")])

    assert_same({"parts": 4, "norm": math.sqrt(18), "numel": 8}, found)


def test_non_finite_counts_include_every_group_of_shards(only):
    counts = [("a", {"infs": 1})] * 2 + [("b", {"nans": 2})] * 2
    found = only([shard_of(group, rank, **odd) for rank, (group, odd) in enumerate(counts)])

    assert_same({"nans": 4, "infs": 2, "numel": 8}, found)


def test_whole_copy_is_not_added_to_shards(only):
    shards = [shard_of("g", rank, norm=3.0, numel=2) for rank in range(2)]
    found = only([*shards, row(rank=2, norm=5.0, numel=4)])

    assert_same({"parts": 3, "numel": 4, "norm": math.sqrt(18)}, found)
