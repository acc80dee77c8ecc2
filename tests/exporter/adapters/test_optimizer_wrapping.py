"""Optimizers that step other ones: rates and moments are those of the inner ones; the update ends with the outer."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tests.exporter.parts import Watched, small, train
from torch import nn

Parameters = Iterable[nn.Parameter]


class Wrapper:
    """Any class with a method `step`, which changes the parameters after the step of the optimizers that it holds."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        self.parts = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self) -> None:
        for part in self.parts:
            part.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)


class Unfinished(Wrapper, torch.optim.Optimizer):  # type: ignore[misc]  # its constructor does not call that of Optimizer
    pass


class Container(Wrapper, torch.optim.Optimizer):  # type: ignore[misc]  # see Wrapper
    param_groups: Any = None

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        every = [parameter for part in inner for group in part.param_groups for parameter in group["params"]]
        torch.optim.Optimizer.__init__(self, every, {"lr": 7.0})
        self.parts = inner


class Proxy:
    """As of a library that forwards all attributes to the optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._wrapped = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


def adam(net: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(net[0].parameters(), lr=0.25), torch.optim.Adam(net[2].parameters(), lr=0.125)]


@pytest.mark.parametrize(
    "wrap",
    [Wrapper, Unfinished, Container, lambda *of: Wrapper(Wrapper(*of)), lambda *of: Proxy(Wrapper(*of))],  # type: ignore[arg-type]
)
def test_update_has_the_rates_of_the_inner_and_the_values_of_the_outer_step(wrap: Callable[..., Any]):
    net, _ = small()
    outer = wrap(*adam(net))
    if isinstance(outer, torch.optim.Optimizer):
        torch.optim.lr_scheduler.ConstantLR(outer, 1.0)  # replaces the method `step`
    after = {}
    with warnings.catch_warnings(), Watched(net, outer) as watched:
        warnings.simplefilter("error")
        for step in (1, 2):
            net(torch.ones(2, 3)).sum().backward()
            outer.step()
            after[step] = {name: item.detach().norm().item() for name, item in net.named_parameters()}
            net.zero_grad()
    rates = {scalar.value for record in watched.records for scalar in record.scalars if scalar.name == "learning_rate"}

    assert (0, {0.25, 0.125}) == (watched.faults, rates)
    assert [1, 2] == watched.steps("exp_avg_sq", "2.weight")
    for record in watched.rows("param_after"):
        assert after[record.step][record.entry.tensor] == pytest.approx(record.numbers["norm"], rel=1e-6)  # type: ignore[index]


class Slotted:
    """Neither weak references nor new attributes are possible, and other attributes raise another error than usual."""

    __slots__ = ("optimizer",)

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def step(self) -> None:
        self.optimizer.step()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        *((lambda _: nn.Linear(2, 2), "Linear"), (lambda optimizer: [optimizer, object()], "object")),
        *((lambda optimizer: {"main": optimizer}, None), (lambda optimizer: iter([optimizer]), None)),
        *((Slotted, None), (lambda _: None, None)),
    ],
)
def test_no_object_among_the_optimizers_ends_the_attach(given, named):
    net, optimizer = small()
    with Watched(net, given(optimizer)) as watched:
        for _ in range(3):
            train(net, optimizer)

    assert ([1, 2, 3], 0) == (watched.steps("grad_reduced", "0.weight"), watched.faults)
    assert {2, 3} <= set(watched.steps("param_after", "0.weight"))
    assert [named] * bool(named) == [
        n for n in ("Linear", "object") if f"found in {n}" in " ".join(watched.messages("note"))
    ]


def test_optimizer_without_a_torch_optimizer_is_named_once():
    net, _ = small()

    class Own:
        def step(self) -> None:
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(0.9)

    with Watched(net, Own()) as watched:
        net(torch.ones(2, 3)).sum().backward()

    assert [1] == watched.steps("grad_reduced", "0.weight")
    assert any("no torch optimizer was found in Own" in text for text in watched.messages("note"))
