"""Parameters and activations that remain in memory after training, with all quantities and without a monitor."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from rankscope_exporter import Monitor
from rankscope_exporter.quantities import quantity_classes

STEPS = 3
OPTIONS = {
    "structure": {"times": None},
    "hashes": {"of": "all", "every": 1, "state": True},
    "router": {"targets": ["gate"]},
    "attention": {"targets": ["attend"]},
}
CONFIG = {
    "quantities": list(quantity_classes()),
    "options": OPTIONS,
    "capture": {},
    "throughput": {"method": "off"},  # the FLOP counter holds the model while it runs on another thread
    "console": False,
    "exit_wait_seconds": 0,
}


class Attend(nn.Module):
    """Core of an attention with query and key as positional arguments."""

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        heads = query.unflatten(-1, (2, -1)).transpose(1, 2), key.unflatten(-1, (2, -1)).transpose(1, 2)
        weights = (heads[0] @ heads[1].transpose(-2, -1)).softmax(-1)
        return (weights @ heads[1]).transpose(1, 2).flatten(-2)


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
        result: torch.Tensor = self.tied(x, self.words.weight)
        return result


def data(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 5, 11).to(dtype)


class Training:
    """Some training steps of a model, and the tensors that remain after them."""

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
        dtype = next(self.model.parameters()).dtype
        self.model(data(dtype)).square().mean().backward()
        if updates:
            self.optimizer.step()

    def storages(self) -> dict[str, StorageWeakRef]:
        assert self.model is not None
        found = {name: _local(item) for name, item in self.model.named_parameters()}
        return {name: StorageWeakRef(item.untyped_storage()) for name, item in found.items() if item.numel()}


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return found


def left(storages: Mapping[str, StorageWeakRef]) -> list[str]:
    """Return the names of the tensors that still have memory."""
    return [name for name, storage in storages.items() if not storage.expired()]


def assign(training: Training) -> None:
    """Replace the parameters of the model and create a new optimizer, as after a spike of the loss."""
    assert training.model is not None
    other = {name: value.clone() for name, value in training.model.state_dict().items()}
    training.optimizer = None
    training.model.load_state_dict(other, assign=True)


def convert(training: Training) -> None:
    """Convert the parameters in place."""
    assert training.model is not None
    training.optimizer = None
    training.model.to(torch.float64)


def convert_to_others(training: Training) -> None:
    """Convert the parameters to other objects."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        convert(training)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def swap(training: Training) -> None:
    """Convert the parameters by torch.utils.swap_tensors."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        convert(training)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def delete(training: Training) -> None:
    """Delete the model while the monitor is attached."""
    training.model = training.optimizer = None


def detach_and_delete(training: Training) -> None:
    """Delete the model after detach."""
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
