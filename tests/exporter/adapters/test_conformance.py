"""Each framework in `loops.py` and `OWED`: each quantity on each rank equals a float64 training without a wrapper."""

import functools
import itertools

import pytest
from tests.exporter.adapters import expectations, loops
from tests.exporter.adapters.expectations import ALL, LOCAL, REPLICA, SHARD, Owed, Steps
from tests.exporter.adapters.loops import ALONE, CHUNKED, LOOPS, MICROS, MISFORTUNES, SHARDED, SKIPPED, WORLD
from tests.exporter.adapters.observation import EVERY, Outcome, by_chunk, outcomes, train_all
from tests.exporter.adapters.training import STEPS, Net, Truth, truths
from tests.properties import THOROUGH, named

pytestmark = pytest.mark.timeout(600)  # the first test waits for all the training
STAGE = Owed(local="full", shared=frozenset({"full"}), ranks=(0,), micros=MICROS, split=True, everywhere=False)
OWED = {
    "plain, reducing itself": Owed(shared=frozenset({"full"}), micros=2, by_loop=True),
    "ddp": Owed(),
    "ddp, accumulating, bucket views": Owed(micros=2),
    "ddp, many buckets, static graph": Owed(),
    # The first step shows that each micro-batch is reduced.
    "ddp, each reduced": Owed(micros=2, is_summed_from=2),
    "ddp, each reduced, summed": Owed(micros=2),
    "ddp, each reduced, bucket views": Owed(micros=3),
    "ddp, gradient scaler": Owed(scaled=True),
    "ddp, checkpointed": Owed(),
    "ddp, checkpointed reentrantly": Owed(),
    "ddp, compiled": Owed(activations=False),
    "fsdp2": Owed(shared=SHARD),
    "fsdp2, accumulating": Owed(shared=SHARD, micros=2),
    "fsdp2, each reduced": Owed(shared=SHARD, micros=2),
    "fsdp2, mixed precision, each reduced": Owed(shared=SHARD, micros=2, rel=0.1),
    "fsdp2, mixed precision": Owed(shared=SHARD, micros=2, rel=0.1),  # bfloat16 has 8 bits, and sums cancel
    "fsdp1": Owed(shared=SHARD, everywhere=False),  # the flat shard of a rank holds some tensors, and not others
    "fsdp1, accumulating": Owed(shared=SHARD, micros=2, everywhere=False),
    "fsdp1, each reduced": Owed(shared=SHARD, micros=2, everywhere=False),
    "tensor parallel": Owed(local="shard", shared=SHARD | REPLICA, ranks=(0,)),
    "pipeline, gpipe": STAGE,
    "pipeline, 1f1b": STAGE,
    "pipeline, interleaved": STAGE,
    "pipeline, zero bubble": STAGE,
}


USUAL = (
    *(
        "ddp, many buckets, static graph",
        "ddp, each reduced",
        "ddp, each reduced, bucket views",
        "ddp, gradient scaler",
    ),
    *("fsdp2", "fsdp2, mixed precision, each reduced", "fsdp1", "tensor parallel", "pipeline, 1f1b"),
    *("pipeline, interleaved", "fsdp2, failing", "fsdp2, watched by one"),
)
"""Loops of which each run consists. `make test-thorough` trains all of them."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Outcome]:
    names = tuple(EVERY) if THOROUGH else USUAL
    results = outcomes(tmp_path_factory.mktemp("frameworks"), train_all, names)
    for name, rank in itertools.product(CHUNKED, range(WORLD)):
        if name in names:
            by_chunk(results[name, rank])
    return results


@functools.cache
def truth_of(owed: Owed) -> list[Truth]:
    return truths(owed.ranks, owed.micros, split=owed.split, skipped=(SKIPPED,) if owed.scaled else ())


def test_every_loop_has_expectations():
    assert OWED.keys() == LOOPS.keys()


@pytest.mark.parametrize("name", named(USUAL, [*OWED, *MISFORTUNES, *ALONE]))
def test_training_is_bit_identical_and_without_a_fault(name, found):
    for rank in range(WORLD):
        assert [] == found[name, rank].unequal
        assert 0 == found[name, rank].faults
        assert [] == found[name, rank].left
        assert name in ALONE or found[name, rank].hooked


def steps_of(owed: Owed) -> Steps:
    """Return the steps that are not skipped; the skipped one halves the loss scale."""
    steps = [(step, truth) for step, truth in enumerate(truth_of(owed), 1) if not (owed.scaled and step == SKIPPED)]
    return [(step, truth, 1.0 if not owed.scaled else 8.0 if step < SKIPPED else 4.0) for step, truth in steps]


@pytest.mark.parametrize("name", named(USUAL, OWED))
def test_own_gradients_of_each_rank_and_micro_batch_equal_the_reference(name, found):
    expectations.check_own_gradients(found, name, OWED[name], steps_of(OWED[name]))


@pytest.mark.parametrize("name", named(USUAL, OWED))
def test_tensors_combined_over_ranks_equal_the_reference(name, found):
    """Every kind is on every rank for every step."""
    owed = OWED[name]
    kinds = [kind for kind in ALL if not (owed.by_loop and kind == "grad_clipped")]
    expectations.check_kinds(found, name, kinds, activations=owed.activations, skipping=owed.scaled)
    # A shard of no elements has a clipped gradient that equals the reduced one.
    expectations.check_combined(found, name, owed, steps_of(owed), kinds, divided=("grad_clipped",))


@pytest.mark.parametrize("name", named(USUAL, [name for name, owed in OWED.items() if owed.activations]))
def test_activations_of_each_rank_and_micro_batch_equal_the_reference(name, found):
    expectations.check_activations(found, name, OWED[name], steps_of(OWED[name]))


def test_step_skipped_by_the_scaler_has_its_gradients(found):
    expectations.check_skipped(found, "ddp, gradient scaler")


@pytest.mark.parametrize("name", named(USUAL, SHARDED))
def test_shard_names_the_ranks_of_the_other_shards(name, found):
    for rank in range(WORLD):
        sharded = {row.shard_group for row in found[name, rank].rows if row.placement == "shard"}
        whole = {row.shard_group for row in found[name, rank].rows if row.placement != "shard"}
        assert ({"0,1"}, {None}) == (sharded, whole)


@pytest.mark.parametrize("name", named(USUAL, ["fsdp2", "fsdp1", "fsdp2, mixed precision"]))
def test_unsharded_gradient_has_the_shape_of_the_whole_tensor(name, found):
    shapes = {key: tuple(item.shape) for key, item in Net().named_parameters()}
    own = [row for row in found[name, 0].rows if row.kind == LOCAL]

    assert shapes == {row.tensor: row.shape for row in own}
    # FSDP2 keeps the sum of micro-batches in the dtype of the reduction.
    assert {"float32"} == {row.dtype for row in own if row.micro_step is None}
    assert {"bfloat16" if "mixed" in name else "float32"} == {row.dtype for row in own if row.micro_step is not None}


@pytest.mark.parametrize("name", named(USUAL, ALONE))
def test_one_rank_can_be_monitored_without_the_others(name, found):
    """A hidden collective would hang, or would mix up the messages of the ranks."""
    usual, alone = found[name.removesuffix(", watched by one"), 0].rows, found[name, 0].rows

    assert {(row.step, row.kind, row.tensor, row.numbers["norm"]) for row in usual} == {
        (row.step, row.kind, row.tensor, row.numbers["norm"]) for row in alone
    }
    assert [] == found[name, 1].rows


@pytest.mark.parametrize("name", named(USUAL, CHUNKED))
def test_modules_of_all_stages_have_features_and_structure(name, found):
    expectations.check_calls([found[name, rank] for rank in range(WORLD)], truth_of(STAGE), MICROS, split=True)


@pytest.mark.parametrize("name", named(USUAL, CHUNKED))
def test_each_stage_of_a_rank_has_its_number(name, found):
    for rank in range(WORLD):
        assert {0, 1} == {row.vpp_stage for row in found[name, rank].rows if row.kind.startswith("act_")}
        assert {None} == {row.vpp_stage for row in found["pipeline, 1f1b", rank].rows}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [LOCAL, "grad_reduced"])
def test_gradients_exist_exactly_while_a_parameter_is_not_frozen(kind, found):
    steps = {"blocks.0.up.weight": {loops.THAWED, STEPS}, "leave.weight": set(range(1, loops.FROZEN))}
    for rank, (tensor, expected) in itertools.product(range(WORLD), steps.items()):
        rows = [row for row in found["fsdp2, thawed and frozen", rank].rows if (row.kind, row.tensor) == (kind, tensor)]
        assert expected == {row.step for row in rows if row.micro_step is None}


@pytest.mark.parametrize("name", named(USUAL, [name for name in MISFORTUNES if "failing" in name]))
def test_forward_pass_that_raises_is_no_step(name, found):
    for rank in range(WORLD):
        failing = [row for row in found[name, rank].rows if row.micro_step is None]
        usual = [row for row in found[name.removesuffix(", failing"), rank].rows if row.micro_step is None]
        assert usual == failing
        rows = expectations.of_kind(found, name, LOCAL, loops.FAILED, [rank])
        assert {None, 0} == {row.micro_step for row in rows}  # the result of the first forward pass is dropped
