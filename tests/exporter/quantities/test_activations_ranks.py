"""Two ranks: each has the activations of its own batches, or its shard of them; training is bit-identical."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exporter.quantities.activation_runs import Key, Notes, equal_bits, read, same, train
from tests.exporter.quantities.test_activations import Blocks, batch, blocks
from tests.programs import warm_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from rankscope_exporter import Monitor, MonitorConfig

WORLD, STEPS, MICRO_BATCHES = 2, 2, 2


def ddp(mode: str = "plain", **options: Any) -> nn.Module:
    return DistributedDataParallel(blocks(mode), **options)


def fsdp1() -> nn.Module:
    policy = ModuleWrapPolicy({nn.Sequential})
    return FullyShardedDataParallel(
        blocks(), use_orig_params=True, device_id=torch.device("cpu"), auto_wrap_policy=policy
    )


def fsdp2() -> nn.Module:
    model, mesh = blocks(), init_device_mesh("cpu", (WORLD,))
    for part in (model.first, model.shared, model):
        fully_shard(part, mesh=mesh)
    return model


CASES: dict[str, Callable[[], nn.Module]] = {
    "ddp": ddp,
    "ddp with bucket views": partial(ddp, gradient_as_bucket_view=True),
    "ddp, checkpoints without reentrance": partial(ddp, "without reentrance"),
    "ddp, reentrant checkpoints": partial(ddp, "reentrant", static_graph=True),
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
}

# FSDP2 passes its own tensor to a wrapped module. The gradient of that tensor lacks the path around the module.
OWN_INPUT = {"fsdp2": {"first", "first.0", "shared", "shared.0"}}


def work(rank: int, store: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for case, make in CASES.items():
        results.put((case, rank, *both(case, make, rank)))
        dist.barrier()
    results.put(("tensor parallel", rank, *tensor_parallel()))
    dist.barrier()
    results.put(("pipeline", rank, *pipeline(rank)))
    dist.barrier()
    dist.destroy_process_group()


def loss(model: nn.Module, step: int, micro: int, rank: int, note: Any = None) -> torch.Tensor:
    seed = 1000 * step + 10 * micro + rank
    torch.manual_seed(seed)  # of dropout
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    if isinstance(model, DistributedDataParallel) and not model.static_graph:
        model.require_backward_grad_sync = micro == MICRO_BATCHES - 1
    return (model(x) if note is None else model(x, note)).square().mean()


def both(case: str, make: Callable[[], nn.Module], rank: int) -> tuple[Any, ...]:
    """Train without and with the monitor; return the differences from the references, and the results of the run."""
    micro_losses = [lambda model, step, micro=micro: loss(model, step, micro, rank) for micro in range(MICRO_BATCHES)]
    bare = train(make(), micro_losses, STEPS, None)
    run = train(make(), micro_losses, STEPS, {})
    left_out = OWN_INPUT.get(case, set())
    differs = []
    for step, tensors in enumerate(references(rank), 1):
        kept = [
            {key: value for key, value in rows.items() if key.kind != "act_grad_in" or key.module not in left_out}
            for rows in (tensors, run.rows[step])
        ]
        try:
            same(*kept, rtol=1e-4)
        except AssertionError as error:
            differs.append((step, str(error)))
    return differs, list(run.rows), equal_bits(bare, run), run.faults, run.notices, run.placements


def tensor_parallel() -> tuple[Any, ...]:
    """Return the rows of a layer whose outputs are sharded over the ranks, and the complete outputs."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
        plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
        return parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)

    def one(model: nn.Module, step: int) -> torch.Tensor:
        value: torch.Tensor = model(batch(step)).square().mean()
        return value

    bare, run = train(make(), one, 2, None), train(make(), one, 2, {})
    torch.manual_seed(0)
    whole = nn.Linear(6, 8)(batch(1))
    norm = run.rows[1][Key("act_out", "0")]["norm"]
    return equal_bits(bare, run), run.faults, run.notices, run.placements, norm, float(whole.detach().norm())


def pipeline(rank: int) -> tuple[Any, ...]:
    """Return the measured and the expected norms of each micro-batch of a stage."""
    chunks, seen, states = 4, {}, []
    for on in (False, True):
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)) for _ in range(WORLD)]
        # Shapes are given, because the first step would otherwise need an additional forward pass to infer them.
        form = torch.zeros(3, 6, requires_grad=True)
        stage = PipelineStage(parts[rank], rank, WORLD, torch.device("cpu"), input_args=form, output_args=form)
        schedule = Schedule1F1B(stage, chunks, loss_fn=lambda y, _target: y.square().mean())
        optimizer = torch.optim.SGD(parts[rank].parameters(), lr=0.1)
        config = MonitorConfig(quantities=("activations",), enabled=on, console=False, exit_wait_seconds=0)
        monitor = Monitor(config).attach(parts[rank], optimizer)
        x = torch.cat([batch(1, micro) for micro in range(chunks)])
        with torch.no_grad():
            inside = x if rank == 0 else copy.deepcopy(parts[0])(x)
            outputs = parts[rank][0](inside).chunk(chunks)
        expected = [float(part.norm()) for part in outputs]
        gradients = [2 * float(part.relu().norm()) / part.numel() for part in outputs]  # of the last stage
        schedule.step(*([x] if rank == 0 else []), **({} if rank == 0 else {"target": torch.zeros(3 * chunks)}))
        optimizer.step()
        monitor.end_step()
        if on:
            rows, _, _ = read(monitor, 1)
            seen = {kind: [rows[1].get(Key(kind, "0", None, n), {}).get("norm") for n in range(chunks)] for kind in ROW}
        monitor.detach()
        states.append([parameter.detach().clone() for parameter in parts[rank].parameters()])
    equal = all(torch.equal(one, other) for one, other in zip(*states, strict=True))
    return equal, monitor.faults, seen, expected, gradients


ROW = ("act_out", "act_grad_out")


def references(rank: int) -> list[dict[Key, torch.Tensor]]:
    """Return the tensors of one process that computes the batches of all ranks and averages their gradients."""
    model, found = blocks(inplace=False), []
    for step in range(1, STEPS + 1):
        gradients = []
        for one in range(WORLD):
            notes = Notes()
            for micro in range(MICRO_BATCHES):
                notes.micro_step = micro
                loss(model, step, micro, one, notes).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
            model.zero_grad()
            if one == rank:
                found.append({key: tensor.detach().clone() for key, tensor in notes.tensors().items()})
        update(model, gradients)
    return found


def update(model: Blocks, gradients: list[list[Any]]) -> None:
    with torch.no_grad():
        for parameter, parts in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.sub_(0.1 * sum(parts) / WORLD)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Run all cases in one pair of processes, because starting torch takes longer than all of the training."""
    context = warm_processes()
    results = context.Queue()
    store = str(tmp_path_factory.mktemp("ddp") / "store")
    workers = [context.Process(target=work, args=(rank, store, results), daemon=True) for rank in range(WORLD)]
    for worker in workers:
        worker.start()
    rows = [results.get(timeout=150) for _ in range(WORLD * (len(CASES) + 2))]
    for worker in workers:
        worker.join(30)

    assert [0] * WORLD == [worker.exitcode for worker in workers]
    return {(case, rank): rest for case, rank, *rest in rows}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.thorough
def test_every_rank_has_activations_of_its_own_batches(case, outcomes):
    for rank in range(WORLD):
        differs, steps, is_equal, faults, notices, placements = outcomes[case, rank]

        assert [] == differs
        assert [1, 2] == steps
        assert (True, 0, [], {"full"}) == (is_equal, faults, notices, placements)


def test_tensor_sharded_over_ranks_is_measured_in_parts(outcomes):
    norms = []
    for rank in range(WORLD):
        *rest, norm, whole = outcomes["tensor parallel", rank]
        norms.append(norm)

        assert [True, 0, [], {"full", "replica", "shard"}] == rest
    assert whole == pytest.approx(sum(norm**2 for norm in norms) ** 0.5, rel=1e-5)


def test_micro_batches_of_a_pipeline_are_separate_on_every_stage(outcomes):
    """Forward and backward passes alternate. A gradient has the micro-batch number of its forward pass."""
    for rank in range(WORLD):
        is_equal, faults, seen, expected, gradients = outcomes["pipeline", rank]

        assert (True, 0) == (is_equal, faults)
        assert expected == pytest.approx(seen["act_out"], rel=1e-5)
        if rank == WORLD - 1:
            assert gradients == pytest.approx(seen["act_grad_out"], rel=1e-5)
        assert 4 == len(set(seen["act_grad_out"]))
