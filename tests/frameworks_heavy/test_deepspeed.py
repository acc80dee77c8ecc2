"""Conformance of DeepSpeed in every stage of ZeRO, on two ranks, with a float64 training without a wrapper.

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
    require,
)
from heavy_watching import train_all
from tests.exporter.adapters.expectations import SHARD
from tests.exporter.adapters.loops import SKIPPED, WORLD
from tests.exporter.adapters.observation import Outcome, outcomes
from tests.exporter.adapters.training import Truth, truths

pytestmark = [
    pytest.mark.timeout(900),  # the first test waits for all the training, and for DeepSpeed to compile an operator
    require("deepspeed"),
]

ROUGH = 0.1  # bfloat16 has 8 bits, and sums cancel
# A rank's flat part holds some tensors and not others.
FLAT = HeavyOwed(shared=SHARD, everywhere=False)
OWED = {
    "zero 0": HeavyOwed(),
    "zero 0, accumulating": HeavyOwed(micros=2),
    "zero 0, bfloat16": HeavyOwed(rel=ROUGH, primed=True),
    "zero 1": FLAT,
    "zero 1, accumulating": HeavyOwed(shared=SHARD, everywhere=False, micros=2),
    "zero 1, two groups": FLAT,
    "zero 1, bfloat16 summed in float32": HeavyOwed(shared=SHARD, everywhere=False, micros=2, rel=ROUGH),
    "zero 1, infinite": HeavyOwed(shared=SHARD, everywhere=False, skipping=True),
    "zero 2": FLAT,
    "zero 2, accumulating": HeavyOwed(shared=SHARD, everywhere=False, micros=2),
    "zero 2, accumulating by hand": HeavyOwed(shared=SHARD, everywhere=False, micros=2),
    "zero 2, bfloat16, accumulating": HeavyOwed(shared=SHARD, everywhere=False, micros=2, rel=ROUGH),
    "zero 2, checkpointed": FLAT,
    "zero 2, small buckets": FLAT,
    "zero 2, bfloat16": HeavyOwed(shared=SHARD, everywhere=False, rel=ROUGH),
    "zero 2, offloaded": FLAT,
    "zero 2, infinite": HeavyOwed(shared=SHARD, everywhere=False, skipping=True),
    "zero 3": FLAT,
    "zero 3, accumulating": HeavyOwed(shared=SHARD, everywhere=False, micros=2),
    "zero 3, accumulating, offloaded": HeavyOwed(shared=SHARD, everywhere=False, micros=3),
    "zero 3, checkpointed": FLAT,
    "zero 3, sub-groups": FLAT,
    "zero 3, bfloat16": HeavyOwed(shared=SHARD, everywhere=False, rel=ROUGH),
    "zero 3, offloaded": FLAT,
    "zero 3, infinite": HeavyOwed(shared=SHARD, everywhere=False, skipping=True),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Outcome]:
    work = functools.partial(train_all, loops="deepspeed_loops")
    return outcomes(tmp_path_factory.mktemp("deepspeed"), work, tuple(OWED), wait_seconds=600)


@functools.cache
def truth_of(owed: HeavyOwed) -> list[Truth]:
    skipped = (SKIPPED,) if owed.skipping else ()
    return truths(owed.ranks, owed.micros, skipped=skipped, clip=heavy_clipping.deepspeed, primed=owed.primed)


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


@pytest.mark.parametrize("name", OWED)
def test_activations_of_each_rank_and_micro_batch_equal_the_reference(name, found):
    check_activations(found, name, OWED[name], truth_of(OWED[name]))


@pytest.mark.parametrize("name", [name for name, owed in OWED.items() if owed.skipping])
def test_skipped_step_has_its_gradients(name, found):
    for rank in range(WORLD):
        check_skipped(found[name, rank])
