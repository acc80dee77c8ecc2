"""Measurements of two ranks in training: runs every loop with and without the monitor, in one pair of processes."""

import queue
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # programs of tests begin elsewhere

import torch
import torch.distributed as dist
from tests.exporter.adapters.loops import ALONE, LOOPS, MISFORTUNES, WORLD, Loop
from tests.exporter.adapters.training import OUTER
from tests.exporter.parts import QUIET, records_of, session_of
from tests.programs import warm_processes

from rankscope_contract.model.kinds import COUNT_OPS
from rankscope_exporter import Monitor
from rankscope_exporter.publish.sinks import memory

EVERY = {**LOOPS, **MISFORTUNES, **ALONE}
KINDS = ("gradients", "micro_gradients", "parameters", "optimizer_state")
QUANTITIES = (*KINDS, "adam_updates", "direction", "activations")
OPTIONS = {"activations": {"targets": [*OUTER, *(f"[0-9].{name}" for name in OUTER)]}}


@dataclass(frozen=True, slots=True)
class Found:
    step: int
    kind: str
    tensor: str
    micro_step: int | None
    placement: str
    shard_group: str | None
    shape: tuple[int, ...]
    dtype: str
    numbers: dict[str, float | None]
    counts: dict[str, int]
    vpp_stage: int | None = None


@dataclass(frozen=True, slots=True)
class FoundOfModule:
    """A feature of a module, or the fact that it was called."""

    step: int
    kind: str
    module: str
    index: int | None
    micro_step: int | None
    vpp_stage: int | None
    value: float | None


@dataclass(slots=True)
class Outcome:
    rows: list[Found] = field(default_factory=list)
    events: list[tuple[int, str]] = field(default_factory=list)
    of_modules: list[FoundOfModule] = field(default_factory=list)
    faults: int = 0
    unequal: list[str] = field(default_factory=list)
    """Tensors that the monitor changed; expected to be empty."""
    hooked: list[str] = field(default_factory=list)
    """Hooks after attach() and training, by module."""
    left: list[str] = field(default_factory=list)
    """Hooks that remain after detach()."""


def outcomes(
    folder: Path,
    work: Any,
    names: Sequence[str] = tuple(EVERY),
    *,
    wait_seconds: float = 200,
    exit_codes: Sequence[int] = (0,) * WORLD,
) -> dict[tuple[str, int], Any]:
    """Return the results of `work(rank, store, names, results)` by name and rank; torch is started once."""
    context = warm_processes()
    results = context.Queue()
    arguments = (str(folder / "store"), list(names), results)
    workers = [context.Process(target=work, args=(rank, *arguments)) for rank in range(WORLD)]
    for worker in workers:
        worker.start()
    try:
        rows = [_next(results, workers, exit_codes, wait_seconds) for _ in range(WORLD * len(names))]
        for worker in workers:
            worker.join(30)
        assert exit_codes == tuple(worker.exitcode for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
    return {(name, rank): outcome for name, rank, outcome in rows}


def _next(results: Any, workers: Sequence[Any], exit_codes: Sequence[int], wait_seconds: float) -> Any:
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            return results.get(timeout=1)
        except queue.Empty:
            assert all(worker.exitcode in (None, code) for worker, code in zip(workers, exit_codes, strict=True))
            assert time.monotonic() < deadline


def train_all(rank: int, store: str, names: list[str], results: Any) -> None:
    begin(rank, store)
    for name in names:
        results.put((name, rank, watched(EVERY[name], rank, enabled=name not in ALONE or rank == 0)))
        dist.barrier()
    dist.destroy_process_group()


def begin(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)


def watched(make: Callable[[int], Loop], rank: int, *, enabled: bool = True) -> Outcome:
    """Train twice, once without the monitor."""
    alone = make(rank)
    losses = alone.train(alone.optimizer())
    loop = make(rank)
    optimizer = loop.optimizer()
    outcome = Outcome()
    quantities = tuple(dict.fromkeys((*QUANTITIES, *loop.also)))
    config = {**QUIET, "quantities": quantities, "options": {**OPTIONS, **loop.also}, "enabled": enabled}
    with Monitor(config) as monitor:
        monitor.attach(loop.attached, optimizer)
        seen = loop.train(optimizer)
        monitor.end_step()
        read(monitor, outcome)
        outcome.faults = monitor.faults
        outcome.hooked = left_behind(loop.model)
    outcome.left = left_behind(loop.model)
    outcome.unequal += [f"loss {step}" for step, pair in enumerate(zip(losses, seen, strict=True), 1) if unequal(*pair)]
    states = zip(alone.state(), loop.state(), strict=True)
    outcome.unequal += [f"parameter {place}" for place, pair in enumerate(states) if unequal(*pair)]
    return outcome


def unequal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is not other
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.shape != other.shape or not torch.equal(*bits)


def left_behind(model: torch.nn.Module) -> list[str]:
    hooks = [(name, hook) for name, module in model.named_modules() for hook in _hooks_of(module)]
    return [name for name, hook in hooks if "rankscope" in type(hook).__module__ + getattr(hook, "__module__", "")]


def _hooks_of(module: torch.nn.Module) -> list[Any]:
    gathered = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = () if gathered is None else getattr(gathered, "_fsdp_param_groups", None)
    groups = filter(None, (gathered._fsdp_param_group,)) if groups is None else groups  # before torch 2.12
    tensors = [source._unsharded_param for group in groups for source in group.fsdp_params]
    on_tensors = [hook for tensor in tensors for hook in (tensor._backward_hooks or {}).values()]
    on_tensors += [hook for item in tensors for hook in (item._post_accumulate_grad_hooks or {}).values()]
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *on_tensors]


def read(monitor: Monitor, outcome: Outcome) -> None:
    if monitor.address is None:
        return
    session = session_of(monitor)
    assert session.publisher.catch_up(60)
    for record in records_of(session):
        outcome.events += [(record.step, event.type) for event in record.events]
        outcome.rows += rows_of(record)
        outcome.of_modules += of_modules(record)


def by_chunk(outcome: Outcome) -> None:
    """Give rows of chunks the names that their modules have in the whole model; each row is of its chunk."""
    assert all(row.tensor.startswith(f"{row.vpp_stage}.") for row in outcome.rows)
    assert all(row.module.partition(".")[0] == str(row.vpp_stage) for row in outcome.of_modules)
    outcome.rows = [replace(row, tensor=row.tensor.partition(".")[2]) for row in outcome.rows]
    outcome.of_modules = [replace(row, module=row.module.partition(".")[2]) for row in outcome.of_modules]


def of_modules(record: Any) -> list[FoundOfModule]:
    names = ("kind", "module", "index", "micro_step", "vpp_stage")
    found = [FoundOfModule(record.step, *map(row.get, names), row["value"]) for row in record.features]
    called = [row for row in record.modules if row["inputs"] is not None]
    return found + [FoundOfModule(record.step, "called", x["module"], None, None, x["vpp_stage"], None) for x in called]


def rows_of(record: Any) -> list[Found]:
    return [
        Found(
            *(row.step, entry.kind, entry.tensor, entry.micro_step, entry.placement, entry.shard_group),
            *(tuple(entry.shape), entry.dtype),
            numbers={op: row.numbers[op] for op in ("norm", "min", "max", "mean")},
            counts={op: int(row.numbers[op] or 0) for op in COUNT_OPS},
            vpp_stage=entry.vpp_stage,
        )
        for row in memory.rows_of(record)
        for entry in [row.entry]
    ]
