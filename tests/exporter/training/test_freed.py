"""The monitor keeps no parameter and no activation alive, and has no weak references to them."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from tests.exporter.training.freed_models import CONFIG, STEPS, WAYS, Net, Training, left_after
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from rankscope_exporter import Monitor


@pytest.mark.usual(1)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_parameters_are_freed_when_the_model_drops_them(way):
    assert [[], [], 0] == left_after(way, Net, watched=True)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("updates", [True, False])
def test_activations_are_freed_as_early_as_without_a_monitor(updates, every):
    assert alive_in_forward(watched=False, updates=updates) == alive_in_forward(
        watched=True, updates=updates, every=every
    )


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
        tensors = [
            *net.parameters(),
            *net.buffers(),
            *(item.grad for item in net.parameters() if item.grad is not None),
        ]
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
        rows = {
            row.entry.call_seq: row.numbers["max"] for row in monitor.current("act_in") if row.entry.module == "inner"
        }

    assert {None: 1.0, 1: 2.0, 2: 3.0} == rows
