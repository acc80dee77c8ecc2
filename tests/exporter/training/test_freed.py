"""The monitor keeps no parameter and no activation alive, on one rank and on two, without weak references to them."""

import gc
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exporter.adapters.loops import WORLD
from tests.exporter.adapters.observation import begin, outcomes
from tests.exporter.parts import QUIET
from tests.properties import THOROUGH
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from rankscope_exporter import Monitor
from rankscope_exporter.measure.quantities import quantity_classes

STEPS = 3
HASHES = {"of": "all", "every": 1, "state": True}
TARGETS = {"router": {"targets": ["gate"]}, "attention": {"targets": ["attend"]}}
OPTIONS = {"structure": {"times": None}, "hashes": HASHES, **TARGETS}
CONFIG = {"quantities": list(quantity_classes()), "options": OPTIONS, "capture": {}, **QUIET}


class Attend(nn.Module):
    """Core of an attention with query and key as positional arguments."""

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        heads = query.unflatten(-1, (2, -1)).transpose(1, 2), key.unflatten(-1, (2, -1)).transpose(1, 2)
        return ((heads[0] @ heads[1].transpose(-2, -1)).softmax(-1) @ heads[1]).transpose(1, 2).flatten(-2)


class Tied(nn.Module):
    """A last layer that receives the weight of the first layer."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight


class Net(nn.Module):
    """A model with a parameter as argument, a part without gradients, a frozen layer, a buffer and a router."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Linear(11, 8, bias=False)
        self.fixed = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.attend = Attend()
        self.gate = nn.Linear(8, 3)
        self.tied = Tied()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            before = self.fixed(self.fixed(self.words(x)))
        x = self.norm(self.attend(self.words(x), self.words(x) + before))
        x = x * self.gate(x).softmax(-1)[..., :1]
        return self.tied(x, self.words.weight)


def data(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 5, 11).to(dtype)


class Training:
    def __init__(self, model: nn.Module, *, watched: bool, every: int = 1) -> None:
        self.model: nn.Module | None = model
        self.optimizer: torch.optim.Optimizer | None = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.monitor = Monitor({**CONFIG, "every": every})
        if watched:
            self.monitor.attach(model, self.optimizer)

    def step(self, *, updates: bool = True) -> None:
        assert self.model is not None
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        self.model(data(next(self.model.parameters()).dtype)).square().mean().backward()
        if updates:
            self.optimizer.step()

    def storages(self) -> dict[str, StorageWeakRef]:
        assert self.model is not None
        found = {name: _local(item) for name, item in self.model.named_parameters()}
        return {name: StorageWeakRef(item.untyped_storage()) for name, item in found.items() if item.numel()}


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def left(storages: Mapping[str, StorageWeakRef]) -> list[str]:
    return [name for name, storage in storages.items() if not storage.expired()]


def assign(training: Training) -> None:
    """Replace the parameters of the model and create a new optimizer, as after a spike of the loss."""
    assert training.model is not None
    other = {name: value.clone() for name, value in training.model.state_dict().items()}
    training.optimizer = None
    training.model.load_state_dict(other, assign=True)


def convert(training: Training) -> None:
    assert training.model is not None
    training.optimizer = None
    training.model.to(torch.float64)


def convert_with(choose: Callable[[bool], None], training: Training) -> None:
    choose(True)
    try:
        convert(training)
    finally:
        choose(False)


def convert_to_others(training: Training) -> None:
    convert_with(torch.__future__.set_overwrite_module_params_on_conversion, training)


def swap(training: Training) -> None:
    convert_with(torch.__future__.set_swap_module_params_on_conversion, training)


def delete(training: Training) -> None:
    training.model = training.optimizer = None


def detach_and_delete(training: Training) -> None:
    training.monitor.detach()
    delete(training)


WAYS: tuple[Callable[[Training], None], ...] = (*(assign, convert, convert_to_others, swap, delete, detach_and_delete),)


def left_after(way: Callable[[Training], None], make: Callable[[], nn.Module], *, watched: bool) -> list[Any]:
    """Return the parameters that remain after some steps and `way`, before and after garbage collection, and faults."""
    training = Training(make(), watched=watched)
    for _ in range(STEPS):
        training.step()
    gc.collect()
    gc.disable()
    try:
        before = training.storages()
        way(training)
        at_once = left(before)
    finally:
        gc.enable()
    gc.collect()
    later = left(before)
    training.monitor.detach()
    return [at_once, later, training.monitor.faults]


@pytest.mark.usual(1)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_parameters_are_freed_when_the_model_drops_them(way):
    assert [[], [], 0] == left_after(way, Net, watched=True)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("updates", [True, False])
def test_activations_are_freed_as_early_as_without_a_monitor(updates, every):
    alone = alive_in_forward(watched=False, updates=updates)

    assert alone == alive_in_forward(watched=True, updates=updates, every=every)


def alive_in_forward(*, watched: bool, updates: bool, every: int = 1) -> list[int]:
    """Return the number of live module outputs at the end of each forward pass of a module and of each step."""
    training = Training(Net(), watched=watched, every=every)
    outputs: list[StorageWeakRef] = []
    counts: list[int] = []

    def note(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        counts.append(sum(not one.expired() for one in outputs))
        outputs.append(StorageWeakRef(output.untyped_storage()))

    assert training.model is not None
    for module in training.model.children():
        module.register_forward_hook(note)
    for _ in range(STEPS):
        training.step(updates=updates)
        counts.append(sum(not one.expired() for one in outputs))
    training.monitor.detach()
    return counts


def test_no_tensor_of_the_model_has_a_weak_reference_in_a_step():
    found: list[int] = []
    training = Training(Net(), watched=True)
    net = training.model
    assert net is not None

    def count(*arguments: Any) -> None:
        gradients = [item.grad for item in net.parameters() if item.grad is not None]
        tensors = [*net.parameters(), *net.buffers(), *gradients]
        tensors += [item for item in arguments if isinstance(item, torch.Tensor) and item.is_leaf]
        found.append(sum(len(weakref.getweakrefs(tensor)) for tensor in tensors))

    for module in net.modules():
        module.register_forward_hook(lambda _module, args, _output: count(*args))
    for _ in range(STEPS):
        training.step()
        count()
    training.monitor.detach()

    assert {0} == set(found)
    assert len(found) > STEPS


class Rewritten(nn.Module):
    """A module that returns a temporary tensor with the same memory at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("state", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            self.state.data.add_(1.0)  # does not change the version of `state`
            x = x + self.inner(self.state.data).sum()
        return x * self.scale


def test_tensor_with_the_id_of_a_freed_tensor_has_its_own_numbers():
    net = Rewritten()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Monitor({**CONFIG, "quantities": ["activations"], "options": {}}).attach(net, optimizer) as monitor:
        net(torch.ones(2)).sum().backward()
        inner = [row for row in monitor.current("act_in") if row.entry.module == "inner"]
        rows = {row.entry.call_seq: row.numbers["max"] for row in inner}

    assert {None: 1.0, 1: 2.0, 2: 3.0} == rows


class RanksNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(11, 8), nn.Tanh(), nn.Linear(8, 8))
        self.gate = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return x * self.gate(x).softmax(-1)[..., :1]


def ddp() -> nn.Module:
    return DistributedDataParallel(RanksNet())


def fsdp1(*, use_orig_params: bool = True) -> nn.Module:
    wrap = partial(FullyShardedDataParallel, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    net = RanksNet()
    net.first = wrap(net.first)
    return wrap(net)


def fsdp2() -> nn.Module:
    net, mesh = RanksNet(), init_device_mesh("cpu", (WORLD,))
    for part in (net.first, net):
        fully_shard(part, mesh=mesh)
    return net


FLAT = partial(fsdp1, use_orig_params=False)
MODELS: dict[str, Callable[[], nn.Module]] = {"ddp": ddp, "fsdp1": fsdp1, "fsdp1, flat": FLAT, "fsdp2": fsdp2}
RANKS_WAYS = {way.__name__: way for way in (assign, convert, delete, detach_and_delete)}
USUAL = ("ddp: delete", "fsdp1: delete", "fsdp2: assign", "fsdp2: convert", "fsdp2: delete")
CASES = [f"{model}: {way}" for model in MODELS for way in RANKS_WAYS] if THOROUGH else USUAL


def work(rank: int, store: str, names: list[str], results: Any) -> None:
    """Run the cases on one rank: [left immediately, left after a collection, faults] without a monitor and with it."""
    begin(rank, store)
    for name in names:
        model, _, way = name.partition(": ")
        both = [left_after(RANKS_WAYS[way], MODELS[model], watched=watched) for watched in (False, True)]
        results.put((name, rank, both))
    dist.destroy_process_group()


@pytest.mark.timeout(300)
def test_parameters_are_freed_as_without_a_monitor(tmp_path):
    """FSDP2 frees its shards, so that this proves something: torch itself keeps flat parameters and DDP's buckets."""
    found = outcomes(tmp_path, work, CASES)

    assert {} == {case: both for case, both in found.items() if both[0] != both[1]}
    for rank in range(WORLD):
        assert [[], [], 0] == found["fsdp2: assign", rank][1] == found["fsdp2: convert", rank][1]
        assert [] == found["fsdp2: delete", rank][1][1] == found["fsdp1: delete", rank][1][1]
