"""Parameters that torch swaps, an option of `.to()` and `load_state_dict`: training and rows are unchanged."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.exporter.parts import QUIET, Watched
from torch import nn

from rankscope_exporter import Monitor
from rankscope_exporter.adapters.parameter_hooks import ACCUMULATED, GRADIENT

QUANTITIES = ("parameters", "gradients", "micro_gradients", "optimizer_state", "activations")
STEPS = 6


@pytest.fixture(autouse=True)
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


class Net(nn.Module):
    """A model that passes a parameter to a module, so the parameter is also an activation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Bilinear(3, 4, 2)
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)), self.inner(self.first.weight)[: len(x)])


Change = Callable[[nn.Module, list[Any]], None]


def convert(net: nn.Module, _seen: list[Any]) -> None:
    net.to(torch.float64)


def convert_and_back(net: nn.Module, _seen: list[Any]) -> None:
    """Convert more than once, so that a tensor may get the address of an earlier one."""
    for dtype in (torch.float64, torch.float32, torch.float64, torch.float32):
        net.to(dtype)


def load(net: nn.Module, _seen: list[Any]) -> None:
    net.load_state_dict({name: 0.5 * value for name, value in net.state_dict().items()})


def hook(net: nn.Module, seen: list[Any]) -> None:
    weight, bias = net.get_parameter("first.weight"), net.get_parameter("last.bias")
    weight.register_hook(lambda gradient: 0.5 * gradient)
    bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))


WAYS: dict[str, dict[int, Sequence[Change]]] = {
    "converted": {3: (convert,)},
    "converted more than once": {3: (convert_and_back,)},
    "loaded": {3: (load,), 5: (load, load)},
    # Torch calls hooks that are the first of a parameter, registered after a swap ...
    "converted, then hooked": {3: (convert, hook)},
    # ... and none of a parameter that had hooks when it was swapped, however late they are registered.
    "hooked, then converted": {2: (hook,), 3: (convert, hook)},
}
"""The action before a step."""


class Outcome:
    def __init__(self, way: str, *, watched: bool, every: int = 1) -> None:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        self.monitor = Monitor(QUIET | {"quantities": QUANTITIES, "every": every})
        if watched:
            self.monitor.attach(net, optimizer)
        self.seen: list[Any] = []
        self.kinds: list[set[tuple[str, str, int | None]]] = []
        for step in range(1, STEPS + 1):
            for change in WAYS[way].get(step, ()):
                change(net, self.seen)
            optimizer.zero_grad()
            net(torch.arange(12.0).reshape(3, 4).to(net.first.weight.dtype) / step).square().sum().backward()
            rows = [row.entry for row in self.monitor.current("grad_unreduced", "grad_reduced", "act_grad_out")]
            self.kinds.append({(entry.kind, entry.tensor, entry.micro_step) for entry in rows})
            optimizer.step()
        self.monitor.detach()
        self.left = [getattr(item, table) for item in net.parameters() for table in (ACCUMULATED, GRADIENT)]
        self.state = [*net.state_dict().values(), *self.seen]


@pytest.mark.parametrize(("way", "every"), [*((way, 1) for way in WAYS), ("converted", 2)])
def test_training_with_swapped_tensors_is_bit_identical(way, every):
    """Rows of each step are from before the swap, and no table of hooks remains."""
    alone, watched = Outcome(way, watched=False), Outcome(way, watched=True, every=every)

    assert len(alone.state) == len(watched.state)
    assert all(map(torch.equal, alone.state, watched.state))
    assert 0 == watched.monitor.faults
    if every == 1 and "hooked" not in way:
        assert [watched.kinds[0]] * STEPS == watched.kinds
        assert {"first.weight", "norm.weight", "last.bias", "inner"} <= {tensor for _, tensor, _ in watched.kinds[0]}
        assert {None} == set(watched.left)


def test_swap_in_the_middle_of_a_step_works_as_without_a_monitor():
    """A loop that sees a NaN loads good parameters before it steps."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Watched(net, optimizer, quantities=QUANTITIES) as watched:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(3, 4)).sum().backward()
            load(net, [])
            convert_and_back(net, [])

    assert 0 == watched.faults
