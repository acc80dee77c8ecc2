"""Training loops of all frameworks: each wraps the same model and trains it on two ranks as documented."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tests.exporter.adapters.training import ADAM, CLIP, ROWS, STEPS, Block, Net, batch, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


@dataclass(slots=True)
class Loop:
    """A wrapped model in training. `attached` is the model that the monitor receives."""

    attached: Any
    model: nn.Module
    backward: Callable[[int], Any]  # computes the gradients of a step and returns the loss, if it is here
    scaler: torch.amp.GradScaler | None = None
    foreach: bool | None = None
    before: Callable[[int, torch.optim.Optimizer], None] = lambda _step, _optimizer: None
    """Changes of the model before a step."""
    also: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Further quantities, or options of those that are always measured."""

    def train(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        return [self._step(step, optimizer) for step in range(1, STEPS + 1)]

    def _step(self, step: int, optimizer: torch.optim.Optimizer) -> Any:
        self.before(step, optimizer)
        loss = self.backward(step)
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(CLIP)
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
        optimizer.zero_grad()
        return loss

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), foreach=self.foreach, **ADAM)

    def state(self) -> list[torch.Tensor]:
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        return [(item.to_local() if isinstance(item, DTensor) else item).clone() for item in parameters]


def plainly(model: nn.Module, rank: int, micros: int = 1, holding: Any = None) -> Loop:
    """Return the usual loop: forward and backward for each micro-batch, the last of which reduces."""

    def backward(step: int) -> torch.Tensor:
        for micro in range(micros):
            with holding(model, last=micro == micros - 1) if holding else nullcontext():
                loss = loss_of(model(batch(rank, step, micro)))
                loss.backward()
        return loss.detach()

    return Loop(model, model, backward)


def no_sync(model: Any, *, last: bool) -> Any:
    return nullcontext() if last else model.no_sync()


def unsynchronized(model: Any, *, last: bool) -> Any:
    model.set_requires_gradient_sync(last)
    return nullcontext()


def reducing_itself(rank: int) -> Loop:
    """Nothing wraps the model; the loop sums gradients over the ranks between backward and update."""
    loop = plainly(Net(), rank, micros=2)
    alone = loop.backward

    def backward(step: int) -> torch.Tensor:
        loss: torch.Tensor = alone(step)
        for parameter in loop.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(WORLD)
        return loss

    loop.backward = backward
    return loop


def ddp(rank: int, **options: Any) -> Loop:
    return plainly(DistributedDataParallel(Net(**options)), rank)


def ddp_scaled(rank: int) -> Loop:
    """With a gradient scaler; the loss of the second step is infinite."""
    model = DistributedDataParallel(Net())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def backward(step: int) -> torch.Tensor:
        loss = loss_of(model(batch(rank, step))) * (float("inf") if step == SKIPPED else 1.0)
        scaler.scale(loss).backward()
        return loss.detach()

    return Loop(model, model, backward, scaler)


SKIPPED = 2


def compiled(rank: int) -> Loop:
    return plainly(torch.compile(DistributedDataParallel(Net()), backend="aot_eager"), rank)  # type: ignore[arg-type]


def fsdp2(rank: int, micros: int = 1, holding: Any = unsynchronized, **options: Any) -> Loop:
    model = Net()
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return plainly(model, rank, micros, holding)


def fsdp2_mixed(rank: int, holding: Any = unsynchronized) -> Loop:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(rank, 2, holding, mp_policy=policy)


def summed(loop: Loop) -> Loop:
    """A loop that reduces each micro-batch: the monitor sums this rank's own gradients at all steps."""
    loop.also = {**loop.also, "gradients": {"sum_micro_batches": True}}
    return loop


def fsdp1(rank: int, micros: int = 1, holding: Any = no_sync) -> Loop:
    options = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "device_id": torch.device("cpu")}
    return plainly(FullyShardedDataParallel(Net(), use_orig_params=True, **options), rank, micros, holding)


def tensor_parallel(_rank: int) -> Loop:
    model = Net()
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    for block in model.blocks.values():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    loop = plainly(model, 0)  # all ranks compute on the same data
    loop.foreach = False  # Adam's own loops do not take plain tensors and DTensors together
    return loop


MICROS = 4


def scheduled(rank: int, stages: Sequence[PipelineStage], schedule: Any) -> Callable[[int], Any]:
    """Return a function that trains the stages of this rank with a step of the schedule."""
    driver = schedule(stages if len(stages) > 1 else stages[0], n_microbatches=MICROS, loss_fn=loss_of)

    def backward(step: int) -> Any:
        if rank == 0:
            driver.step(batch(0, step))
            return None
        losses: list[torch.Tensor] = []
        driver.step(target=torch.zeros(ROWS, 1), losses=losses)
        return torch.stack(losses).detach()

    return backward


def pipeline(rank: int, schedule: Any) -> Loop:
    model = Net()
    del model.blocks["1" if rank == 0 else "0"]
    if rank == 0:
        model.leave = None
    else:
        model.enter = None
    stage = PipelineStage(model, rank, WORLD, torch.device("cpu"))
    return Loop(stage, model, scheduled(rank, [stage], schedule))


PARTS = ("enter", "0", "1", "leave")


def part_of(model: Net, kept: str) -> Net:
    model.blocks = nn.ModuleDict({name: block for name, block in model.blocks.items() if name == kept})
    model.enter = model.enter if kept == "enter" else None
    model.leave = model.leave if kept == "leave" else None
    return model


def interleaved(rank: int, schedule: Any = ScheduleInterleaved1F1B) -> Loop:
    """Each rank has two stages, every second one; the later is listed first."""
    device = torch.device("cpu")
    numbers = (rank, rank + WORLD)
    stages = [PipelineStage(part_of(Net(), PARTS[number]), number, len(PARTS), device) for number in numbers]
    model = nn.ModuleList(stage.submod for stage in stages)
    return Loop(stages[::-1], model, scheduled(rank, stages, schedule), also=OF_CALLS)


def zero_bubble(rank: int) -> Loop:
    """Weight gradients have separate passes, in which torch itself accumulates."""
    return summed(interleaved(rank, ScheduleInterleavedZeroBubble))


CHUNKED = ("pipeline, interleaved", "pipeline, zero bubble")  # names begin with the number of the chunk
OF_CALLS: dict[str, dict[str, Any]] = {"router": {"targets": ["*.up"], "top_k": 1}, "linear": {}, "structure": {}}


def thawed(rank: int) -> Loop:
    """A block is frozen at first, and the last layer in the end."""
    loop = fsdp2(rank)
    loop.model.blocks["0"].requires_grad_(False)

    def before(step: int, _optimizer: Any) -> None:
        loop.model.blocks["0"].requires_grad_(step >= THAWED)
        loop.model.leave.requires_grad_(step < FROZEN)

    loop.before = before
    return loop


THAWED, FROZEN = 2, 3


def failing(loop: Loop) -> Loop:
    """A forward pass that raises before its loss is used."""

    def before(step: int, _optimizer: Any) -> None:
        if step == FAILED:
            with suppress(ZeroDivisionError):
                loop.model(batch(0, STEPS + 1))
                raise ZeroDivisionError

    loop.before = before
    return loop


FAILED = 2


LOOPS: dict[str, Callable[[int], Loop]] = {
    "plain, reducing itself": reducing_itself,
    "ddp": ddp,
    "ddp, accumulating, bucket views": lambda rank: plainly(
        DistributedDataParallel(Net(), gradient_as_bucket_view=True), rank, micros=2, holding=no_sync
    ),
    "ddp, many buckets, static graph": lambda rank: plainly(
        DistributedDataParallel(Net(), bucket_cap_mb=0.0005, static_graph=True), rank
    ),
    "ddp, each reduced": lambda rank: plainly(DistributedDataParallel(Net()), rank, micros=2),
    "ddp, each reduced, summed": lambda rank: summed(plainly(DistributedDataParallel(Net()), rank, micros=2)),
    "ddp, each reduced, bucket views": lambda rank: summed(
        plainly(DistributedDataParallel(Net(), gradient_as_bucket_view=True), rank, micros=3)
    ),
    "ddp, gradient scaler": ddp_scaled,
    "ddp, checkpointed": lambda rank: ddp(rank, checkpointed=True),
    "ddp, checkpointed reentrantly": lambda rank: summed(ddp(rank, checkpointed=True, reentrant=True)),
    "ddp, compiled": compiled,
    "fsdp2": fsdp2,
    "fsdp2, accumulating": lambda rank: fsdp2(rank, micros=2),
    "fsdp2, each reduced": lambda rank: summed(fsdp2(rank, 2, None)),
    "fsdp2, mixed precision": fsdp2_mixed,
    "fsdp2, mixed precision, each reduced": lambda rank: summed(fsdp2_mixed(rank, None)),
    "fsdp1": fsdp1,
    "fsdp1, accumulating": lambda rank: fsdp1(rank, micros=2),
    "fsdp1, each reduced": lambda rank: summed(fsdp1(rank, 2, None)),
    "tensor parallel": tensor_parallel,
    "pipeline, gpipe": lambda rank: pipeline(rank, ScheduleGPipe),
    "pipeline, 1f1b": lambda rank: pipeline(rank, Schedule1F1B),
    "pipeline, interleaved": interleaved,
    "pipeline, zero bubble": zero_bubble,
}
SHARDED = ("fsdp2", "fsdp1", "tensor parallel")

MISFORTUNES: dict[str, Callable[[int], Loop]] = {
    "fsdp2, thawed and frozen": thawed,
    "fsdp2, failing": lambda rank: failing(fsdp2(rank)),
    "fsdp1, failing": lambda rank: failing(fsdp1(rank)),
    "tensor parallel, failing": lambda rank: failing(tensor_parallel(rank)),
}
ALONE: dict[str, Callable[[int], Loop]] = {f"{name}, watched by one": LOOPS[name] for name in SHARDED}
"""Rank 0 measures, rank 1 does not."""
