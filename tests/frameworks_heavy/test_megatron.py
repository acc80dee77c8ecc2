"""Conformance of Megatron-Core with each kind of parallelism, on two ranks, with a float64 training.

`make test-frameworks` installs it; without it the tests are skipped.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path
sys.path.insert(0, str(Path(__file__).parents[2]))  # programs of tests begin elsewhere

import heavy_clipping
from heavy_checks import (
    HeavyOwed,
    check_activations,
    check_kinds,
    check_own_gradients,
    check_shards,
    check_shared,
    check_skipped,
    check_undisturbed,
    of_kind,
    require,
)
from heavy_watching import train_all
from tests.exporter.adapters.expectations import REPLICA, SHARD, check_calls
from tests.exporter.adapters.loops import SKIPPED, WORLD
from tests.exporter.adapters.observation import Outcome, by_chunk, outcomes
from tests.exporter.adapters.training import Truth, truths

pytestmark = [
    pytest.mark.timeout(900),  # the first test waits for all the training
    require("megatron.core"),
]

ROUGH = 0.1  # bfloat16 has 8 bits, and sums cancel
# A rank's part of the buffers holds some tensors and not others.
OWED = {
    "ddp": HeavyOwed(),
    "ddp, accumulating": HeavyOwed(micros=2),
    "ddp, bfloat16": HeavyOwed(micros=2, rel=ROUGH),
    "distributed": HeavyOwed(shared=SHARD, everywhere=False),
    "distributed, accumulating": HeavyOwed(shared=SHARD, everywhere=False, micros=2, hidden=24),
    "distributed, bfloat16": HeavyOwed(shared=SHARD, everywhere=False, micros=2, rel=ROUGH),
    "distributed, scaled": HeavyOwed(shared=SHARD, everywhere=False, scale=8.0, skipping=True),
    "tensor parallel": HeavyOwed(local="shard", shared=SHARD | REPLICA, ranks=(0,)),
    "tensor parallel, distributed": HeavyOwed(local="shard", shared=SHARD | REPLICA, ranks=(0,)),
    "pipeline": HeavyOwed(
        local="full", shared=frozenset({"full"}), everywhere=False, everywhere_in_forward=False, ranks=(0,), micros=4
    ),
}
CHUNKED = "pipeline, interleaved"  # names begin with the number of the chunk
OWED[CHUNKED] = OWED["pipeline"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Outcome]:
    work = functools.partial(train_all, loops="megatron_loops")
    results = outcomes(tmp_path_factory.mktemp("megatron"), work, tuple(OWED), wait_seconds=600)
    for rank in range(WORLD):
        by_chunk(results[CHUNKED, rank])
    return results


@functools.cache
def truth_of(owed: HeavyOwed) -> list[Truth]:
    skipped = (SKIPPED,) if owed.skipping else ()
    return truths(owed.ranks, owed.micros, skipped=skipped, clip=heavy_clipping.megatron, hidden=owed.hidden)


@pytest.mark.parametrize("name", OWED)
def test_training_is_bit_identical_and_without_a_fault(name, found):
    for rank in range(WORLD):
        check_undisturbed(found[name, rank])


@pytest.mark.parametrize("name", OWED)
def test_every_kind_is_on_every_rank_for_every_step(name, found):
    check_kinds(found, name, OWED[name])


@pytest.mark.parametrize("name", OWED)
def test_own_gradients_of_each_rank_and_micro_batch_equal_the_reference(name, found):
    check_own_gradients(found, name, OWED[name], truth_of(OWED[name]))


@pytest.mark.parametrize("name", OWED)
def test_tensors_combined_over_ranks_equal_the_reference(name, found):
    check_shared(found, name, OWED[name], truth_of(OWED[name]))


@pytest.mark.parametrize("name", OWED)
def test_shard_names_the_ranks_of_the_other_shards(name, found):
    check_shards(found, name)


@pytest.mark.parametrize("name", [name for name, owed in OWED.items() if owed.activations])
def test_activations_of_each_rank_and_micro_batch_equal_the_reference(name, found):
    check_activations(found, name, OWED[name], truth_of(OWED[name]))


@pytest.mark.parametrize("name", [name for name, owed in OWED.items() if owed.skipping])
def test_skipped_step_has_its_gradients(name, found):
    for rank in range(WORLD):
        check_skipped(found[name, rank])


def test_parameter_divided_between_two_ranks_is_combined(found):
    name = "distributed, accumulating"
    shared = [row for row in of_kind(found, name, "exp_avg", 1) if row.tensor == "blocks.0.up.weight"]

    assert WORLD == len(shared)
    assert 6 * 24 == sum(row.counts["numel"] for row in shared)


def test_modules_of_all_chunks_have_features_and_structure(found):
    owed = OWED[CHUNKED]
    check_calls([found[CHUNKED, rank] for rank in range(WORLD)], truth_of(owed), owed.micros, split=owed.split)


def test_each_chunk_of_a_rank_has_its_number(found):
    for rank in range(WORLD):
        assert {0, 1} == {row.vpp_stage for row in found[CHUNKED, rank].rows if row.kind.startswith("act_")}
        assert {None} == {row.vpp_stage for row in found["pipeline", rank].rows}
