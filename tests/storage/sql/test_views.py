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


NOTHING = {"norm": None, "min": None, "max": None, "mean": None, "nans": 4}
COMBINED = {
    "replicas count once": (
        [row(rank=rank, norm=2.0, zeros=1) for rank in range(4)],
        {"parts": 4, "norm": 2.0, "numel": 4, "zeros": 1, "placement": "full"},
    ),
    "NaN on any replica is visible": ([row(rank=0), row(rank=1, nans=2, infs=1)], {"nans": 2, "infs": 1, "numel": 4}),
    "a tensor without finite elements has no norm": (
        [shard_of("g", rank, **NOTHING) for rank in range(2)], {"norm": None, "mean": None, "nans": 8, "numel": 8},
    ),
    "complete groups are preferred, although group a is first": (
        [shard_of(group, rank, norm=3.0) for rank, group in enumerate("abbc")],
        {"parts": 4, "norm": math.sqrt(18), "numel": 8},
    ),
    "counts include every group of shards": (
        [shard_of("a", 0, infs=1), shard_of("a", 1, infs=1), shard_of("b", 2, nans=2), shard_of("b", 3, nans=2)],
        {"nans": 4, "infs": 2, "numel": 8},
    ),
    "a whole copy is not added to shards": (
        [*(shard_of("g", rank, norm=3.0, numel=2) for rank in range(2)), row(rank=2, norm=5.0, numel=4)],
        {"parts": 3, "numel": 4, "norm": math.sqrt(18)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COMBINED)
def test_shards_are_combined_and_replicas_count_once(writer, connection, case):
    rows, expected = COMBINED[case]
    (found,) = combined(writer, connection, rows)

    assert_same(expected, found)


def test_steps_kinds_tensors_heads_and_micro_steps_are_separate(writer, connection):
    keys = {"step": 2, "kind": "param_after", "tensor": "v", "index": 0, "micro_step": 0, "vpp_stage": 1, "call_seq": 3}
    variants = [{}, {"attempt": 1}, *({name: value} for name, value in keys.items())]
    found = combined(writer, connection, [row(**variant) for variant in variants])

    assert [1] * len(variants) == [one["parts"] for one in found]


@pytest.mark.parametrize("placement", ["full", "shard"])
def test_step_measured_twice_in_an_attempt_counts_with_its_last_rows(writer, connection, placement):
    made = {"placement": placement, "shard_group": "g" if placement == "shard" else None}
    told = ((4, 100.0, 3), (9, 3.0, 0), (7, 50.0, 1))
    rows = [row(**made, rank=r, seq=s, ts=10 - s, norm=norm, nans=nans) for r in range(2) for s, norm, nans in told]
    (found,) = combined(writer, connection, rows)

    whole = {"norm": math.sqrt(18), "numel": 8} if placement == "shard" else {"norm": 3.0, "numel": 4}
    assert_same({"parts": 2, "nans": 0, **whole}, found)
