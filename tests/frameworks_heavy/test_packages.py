"""DeepSpeed in every stage of ZeRO, and Megatron-Core: rows of two ranks equal a float64 training without a wrapper."""

import functools
import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path
sys.path.insert(0, str(Path(__file__).parents[2]))  # programs of tests begin elsewhere

import heavy_watching
from heavy_watching import train_all
from tests.exporter.adapters import expectations
from tests.exporter.adapters.expectations import ALL, LOCAL, REPLICA, SHARD, Owed, Steps, check_calls, of_kind
from tests.exporter.adapters.loops import SKIPPED, WORLD
from tests.exporter.adapters.observation import Outcome, by_chunk, outcomes
from tests.exporter.adapters.training import Truth, truths
from tests.exporter.parts import session_of

from rankscope_exporter import Monitor, MonitorConfig

Outcomes = dict[tuple[str, int], Outcome]
pytestmark = pytest.mark.timeout(900)  # the first test waits for all the training, and for DeepSpeed to compile


def require(*packages: str) -> pytest.MarkDecorator:
    """Skip without the packages; if frameworks are required, let the tests fail with the missing package."""
    missing = [name for name in packages if _is_missing(name)]
    required = bool(os.environ.get("RANKSCOPE_REQUIRE_FRAMEWORKS"))
    reason = f"make test-frameworks (not installed: {', '.join(missing)})"
    return pytest.mark.skipif(bool(missing) and not required, reason=reason)


def _is_missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:  # not even the package around it
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyOwed(Owed):
    skipping: bool = False
    """True if the second step is skipped."""
    hidden: int = 8
    """Inner width of the blocks of the model."""
    scale: float = 1.0
    """The loss scale."""
    primed: bool = False
    """True if the package steps its optimizer with zeros at creation, so that the state exists."""


ROUGH = 0.1  # bfloat16 has 8 bits, and sums cancel
# A rank's flat part, or its part of the buffers, holds some tensors and not others.
part = functools.partial(HeavyOwed, shared=SHARD, everywhere=False)
DEEPSPEED = {
    "zero 0": HeavyOwed(),
    "zero 0, accumulating": HeavyOwed(micros=2),
    "zero 0, bfloat16": HeavyOwed(rel=ROUGH, primed=True),
    "zero 1": part(),
    "zero 1, accumulating": part(micros=2),
    "zero 1, two groups": part(),
    "zero 1, bfloat16 summed in float32": part(micros=2, rel=ROUGH),
    "zero 1, infinite": part(skipping=True),
    "zero 2": part(),
    "zero 2, accumulating": part(micros=2),
    "zero 2, accumulating by hand": part(micros=2),
    "zero 2, bfloat16, accumulating": part(micros=2, rel=ROUGH),
    "zero 2, checkpointed": part(),
    "zero 2, small buckets": part(),
    "zero 2, bfloat16": part(rel=ROUGH),
    "zero 2, offloaded": part(),
    "zero 2, infinite": part(skipping=True),
    "zero 3": part(),
    "zero 3, accumulating": part(micros=2),
    "zero 3, accumulating, offloaded": part(micros=3),
    "zero 3, checkpointed": part(),
    "zero 3, sub-groups": part(),
    "zero 3, bfloat16": part(rel=ROUGH),
    "zero 3, offloaded": part(),
    "zero 3, infinite": part(skipping=True),
}
PIPELINE = part(local="full", shared=frozenset({"full"}), ranks=(0,), micros=4)
CHUNKED = "pipeline, interleaved"  # names begin with the number of the chunk
MEGATRON = {
    "ddp": HeavyOwed(),
    "ddp, accumulating": HeavyOwed(micros=2),
    "ddp, bfloat16": HeavyOwed(micros=2, rel=ROUGH),
    "distributed": part(),
    "distributed, accumulating": part(micros=2, hidden=24),
    "distributed, bfloat16": part(micros=2, rel=ROUGH),
    "distributed, scaled": part(scale=8.0, skipping=True),
    "tensor parallel": HeavyOwed(local="shard", shared=SHARD | REPLICA, ranks=(0,)),
    "tensor parallel, distributed": HeavyOwed(local="shard", shared=SHARD | REPLICA, ranks=(0,)),
    "pipeline": PIPELINE,
    CHUNKED: PIPELINE,
}
OWED = {"deepspeed": DEEPSPEED, "megatron": MEGATRON}
NEEDED = {"deepspeed": require("deepspeed"), "megatron": require("megatron.core")}
EVERY = [
    pytest.param(package, name, marks=NEEDED[package], id=f"{package}, {name}")
    for package, loops in OWED.items()
    for name in loops
]
every_loop = pytest.mark.parametrize(("package", "name"), EVERY)


@pytest.fixture(scope="module")
def outcomes_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcomes]:
    @functools.cache
    def trained(package: str) -> Outcomes:
        work = functools.partial(train_all, loops=f"{package}_loops")
        found = outcomes(tmp_path_factory.mktemp(package), work, tuple(OWED[package]), wait_seconds=600)
        for rank in range(WORLD) if package == "megatron" else ():
            by_chunk(found[CHUNKED, rank])
        return found

    return trained


@pytest.fixture
def found(outcomes_of: Callable[[str], Outcomes], package: str) -> Outcomes:
    return outcomes_of(package)


@functools.cache
def truth_of(package: str, owed: HeavyOwed) -> list[Truth]:
    skipped = (SKIPPED,) if owed.skipping else ()
    clip = getattr(heavy_watching, f"clipped_by_{package}")
    return truths(owed.ranks, owed.micros, skipped=skipped, clip=clip, hidden=owed.hidden, primed=owed.primed)


def steps_of(package: str, owed: HeavyOwed) -> Steps:
    steps = enumerate(truth_of(package, owed), 1)
    return [(step, truth, owed.scale) for step, truth in steps if not (owed.skipping and step == SKIPPED)]


@every_loop
def test_training_is_bit_identical_and_without_a_fault(package, name, found):
    for rank in range(WORLD):
        outcome = found[name, rank]
        assert ([], 0, []) == (outcome.unequal, outcome.faults, outcome.left)
        assert outcome.hooked


@every_loop
def test_every_kind_is_on_every_rank_for_every_step(package, name, found):
    owed = OWED[package][name]
    expectations.check_kinds(found, name, ALL, activations=owed.activations, skipping=owed.skipping)


@every_loop
def test_own_gradients_of_each_rank_and_micro_batch_equal_the_reference(package, name, found):
    owed = OWED[package][name]
    expectations.check_own_gradients(found, name, owed, steps_of(package, owed))


@every_loop
def test_tensors_combined_over_ranks_equal_the_reference(package, name, found):
    owed = OWED[package][name]
    expectations.check_combined(found, name, owed, steps_of(package, owed), ALL)


@every_loop
def test_shard_names_the_ranks_of_the_other_shards(package, name, found):
    """A shard has the shape of this rank's part."""
    for rank in range(WORLD):
        for row in found[name, rank].rows:
            assert ("0,1" if row.placement == "shard" else None) == row.shard_group
            if row.placement == "shard" and row.kind != LOCAL:
                assert row.counts["numel"] == math.prod(row.shape)


@every_loop
def test_activations_of_each_rank_and_micro_batch_equal_the_reference(package, name, found):
    owed = OWED[package][name]
    expectations.check_activations(found, name, owed, steps_of(package, owed))


@pytest.mark.parametrize(("package", "name"), [one for one in EVERY if OWED[one.values[0]][one.values[1]].skipping])
def test_skipped_step_has_its_gradients(package, name, found):
    expectations.check_skipped(found, name)


@NEEDED["megatron"]
@pytest.mark.parametrize("package", ["megatron"])
def test_parameter_divided_between_two_ranks_is_combined(found):
    shared = of_kind(found, "distributed, accumulating", "exp_avg", 1)
    shared = [row for row in shared if row.tensor == "blocks.0.up.weight"]

    assert WORLD == len(shared)
    assert 6 * 24 == sum(row.counts["numel"] for row in shared)


@NEEDED["megatron"]
@pytest.mark.parametrize("package", ["megatron"])
def test_modules_of_all_chunks_have_features_and_structure_and_their_number(found):
    calls = [found[CHUNKED, rank] for rank in range(WORLD)]
    check_calls(calls, truth_of("megatron", PIPELINE), PIPELINE.micros, split=PIPELINE.split)

    for rank in range(WORLD):
        assert {0, 1} == {row.vpp_stage for row in found[CHUNKED, rank].rows if row.kind.startswith("act_")}
        assert {None} == {row.vpp_stage for row in found["pipeline", rank].rows}


# Hashes: tensors that the packages keep equal have equal ones, and divided tensors have none.

WHOLE = {
    "deepspeed_loops": ("zero 0", "zero 1", "zero 2", "zero 2, bfloat16", "zero 2, infinite"),
    "megatron_loops": ("ddp", "ddp, bfloat16", "tensor parallel"),
}
DIVIDED = {"deepspeed_loops": ("zero 3",), "megatron_loops": ("distributed", "pipeline")}


def hashed(make: Any, rank: int) -> tuple[dict[tuple[int, str], tuple[str, int]], int]:
    loop = make(rank)
    optimizer = loop.optimizer()
    options = {"hashes": {"every": 1}}
    config = MonitorConfig(quantities=("hashes",), options=options, console=False, exit_wait_seconds=0)
    monitor = Monitor(config).attach(loop.attached, optimizer)
    loop.train(optimizer)
    monitor.end_step()
    session = session_of(monitor)
    assert session.publisher.catch_up(60)
    records = session.channel.ring.after(-1, 1 << 40).records
    monitor.detach()
    rows = {(record.step, row["tensor"]): (row["replicas"], row["hash"]) for record in records for row in record.hashes}
    return rows, monitor.faults


@require("deepspeed", "megatron.core")
@pytest.mark.parametrize("loops", WHOLE)
def test_replicas_have_equal_hashes_and_parts_have_none(loops: str, tmp_path: Path) -> None:
    names = (*WHOLE[loops], *DIVIDED[loops])
    found = outcomes(tmp_path, functools.partial(train_all, loops=loops, result=hashed), names, wait_seconds=600)

    for name in names:
        (one, faults), (other, more) = (found[name, rank] for rank in range(WORLD))
        assert (0, 0) == (faults, more), name
        assert one == other, name
        assert ({"0,1"} if name in WHOLE[loops] else set()) == {replicas for replicas, _ in one.values()}, name


# The packages' examples run, and an imported package does not claim models of other packages.

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OTHERS = """
import tempfile, torch, torch.distributed as dist
import deepspeed, megatron.core.distributed
from torch.nn.parallel import DistributedDataParallel
from rankscope_exporter.adapters import framework_of

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
print(*(type(framework_of(item)).__name__ for item in (model, DistributedDataParallel(model))))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "RANKSCOPE_INGEST_URL": ""}
    how = {"capture_output": True, "text": True, "timeout": 800, "env": environment}
    return subprocess.run((sys.executable, *arguments), cwd=EXAMPLES, check=False, **how)


@require("deepspeed", "megatron.core")
@pytest.mark.parametrize("name", ["deepspeed_zero.py", "megatron_core.py"])
def test_example_trains_without_a_fault(name):
    done = run(*LAUNCH, name, "3")

    assert 0 == done.returncode, done.stderr[-2000:]
    assert "rankscope: run" in done.stdout + done.stderr
    assert "failed, training continues" not in done.stdout + done.stderr


@require("deepspeed", "megatron.core")
def test_imported_package_does_not_claim_other_models():
    done = run("-c", OTHERS)

    assert ["Framework", "DistributedData"] == done.stdout.split()[-2:], done.stderr[-2000:]
