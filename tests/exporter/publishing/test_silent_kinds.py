"""Kinds of rows that are configured and absent are named once; kinds that are absent by definition are not named."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exporter.parts import Watched
from torch import nn

PLAIN = ("parameters", "gradients", "optimizer_state")
ALL = (*PLAIN, "micro_gradients", "activations", "structure", "linear", "adam_updates", "direction")


class Moments(torch.optim.Optimizer):
    """An optimizer with the options of Adam, whose state has the tensors that `state` returns for a parameter."""

    def __init__(self, parameters: Any, state: Callable[[torch.Tensor], dict[str, Any]]) -> None:
        super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8})
        self._make = state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the returned loss is not needed
        for group in self.param_groups:
            for item in group["params"]:
                if item.grad is not None:
                    item.data.add_(item.grad, alpha=-0.01)
                    self.state[item] = self._make(item)


def coded(item: torch.Tensor) -> dict[str, Any]:
    code = torch.full_like(item, 7, dtype=torch.uint8)
    return {"step": torch.tensor(1.0), "state1": code, "state2": code.clone(), "absmax1": torch.ones(1)}


def coded_under_usual_names(item: torch.Tensor) -> dict[str, Any]:
    code = torch.full_like(item, 7, dtype=torch.int8)
    return {"step": 1, "exp_avg": code, "exp_avg_sq": code.clone(), "packed": torch.ones(4, dtype=torch.int32)}


def schedule_free(item: torch.Tensor) -> dict[str, Any]:
    return {"z": torch.ones_like(item), "exp_avg_sq": torch.ones_like(item)}


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def step(net: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    net(torch.randn(3, 4)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def watched(net: nn.Module, *optimizers: torch.optim.Optimizer, quantities: Any = ALL, **settings: Any) -> Watched:
    return Watched(net, optimizers, quantities=list(quantities), **settings)


def notes(seen: Watched) -> list[str]:
    seen.publish()
    return seen.messages("note")


def kinds(seen: Watched, step: int) -> set[str]:
    rows = [row for one in seen.records if one.step == step for row in (*one.features, *one.histograms)]
    return {row["kind"] for row in rows} | {str(row.entry.kind) for row in seen.rows() if row.step == step}


@pytest.mark.parametrize(
    ("state", "quantities", "words"),
    [
        (coded, PLAIN, ("optimizer_state: exp_avg, exp_avg_sq had no rows", "state1 (uint8), state2 (uint8)")),
        (coded, ("adam_updates",), ("adam_updates: adam_ratio, adam_update had no rows",)),
        (coded, ("direction",), ("direction: direction_agreement had no rows",)),
        (coded_under_usual_names, PLAIN, ("optimizer_state: exp_avg, exp_avg_sq had no rows", "exp_avg (int8)")),
        (schedule_free, PLAIN, ("optimizer_state: exp_avg had no rows", "z (float32), exp_avg_sq (float32)")),
    ],
)
def test_state_under_other_names_is_named_once_after_the_third_update(state, quantities, words):
    net = small()
    optimizer = Moments(net.parameters(), state)
    with watched(net, optimizer, quantities=quantities) as seen:
        for _ in range(2):
            step(net, optimizer)
        early = notes(seen)
        for _ in range(6):
            step(net, optimizer)
    late = seen.messages("note")

    assert 0 == seen.faults
    assert [] == early
    assert 1 == len(late)
    assert all(word in late[0] for word in words)


@pytest.mark.parametrize("state", [coded, coded_under_usual_names])
def test_codes_of_a_quantised_state_are_never_published(state):
    options = {"optimizer_state": {"names": ["*", "step"]}, "hashes": {"of": "all", "every": 1, "state": True}}
    names = (*PLAIN, "adam_updates", "direction", "hashes")
    net = small()
    optimizer = Moments(net.parameters(), state)
    with watched(net, optimizer, quantities=names, options=options) as seen:
        for _ in range(3):
            step(net, optimizer)
    published = kinds(seen, 2)
    hashes = [row for record in seen.records for row in record.hashes if row["dtype"] != "float32"]

    usual = {"param_before", "param_after", "grad_unreduced", "grad_reduced"}
    assert published - usual <= {"step", "absmax1"}
    assert hashes
    assert {None} == {row["norm"] for row in hashes}
    assert 0 == seen.faults


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.01),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
    "RAdam": lambda net: torch.optim.RAdam(net.parameters(), lr=0.01),
    "ASGD": lambda net: torch.optim.ASGD(net.parameters(), lr=0.01),
    "Adafactor": lambda net: torch.optim.Adafactor(net.parameters(), lr=0.01),
    "frozen part": lambda net: torch.optim.AdamW(net[0].requires_grad_(False) and net[2].parameters(), lr=0.01),
    "other tensors": lambda net: torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.01),
}


@pytest.mark.usual(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kinds_that_are_absent_by_definition_are_not_named(name):
    net = small()
    optimizer = OPTIMIZERS[name](net)
    with watched(net, optimizer) as seen:
        for _ in range(6):
            step(net, optimizer)

    assert (0, []) == (seen.faults, seen.messages("note"))


def test_alternating_and_skipped_parts_are_not_named():
    net = small()
    first, second = (torch.optim.AdamW(part.parameters(), lr=0.01) for part in (net[0], net[2]))
    with watched(net, first, second) as seen:
        for number in range(8):
            net[0].requires_grad_(number % 2 == 0)
            net[2].requires_grad_(number % 2 == 1)
            step(net, *((first,) if number % 2 == 0 else (second,)))
        for _ in range(4):  # the updates are skipped
            step(net)

    assert (0, []) == (seen.faults, seen.messages("note"))


def test_kinds_that_stop_are_named_once():
    net, updates = small(), []

    def usual_then_coded(item: torch.Tensor) -> dict[str, Any]:
        updates.append(item)
        is_usual = len(updates) <= 3 * len(list(net.parameters()))
        return {"exp_avg": torch.ones_like(item), "exp_avg_sq": torch.ones_like(item)} if is_usual else coded(item)

    optimizer = Moments(net.parameters(), usual_then_coded)
    with watched(net, optimizer, quantities=PLAIN) as seen:
        for _ in range(10):
            step(net, optimizer)
    (note,) = seen.messages("note")

    assert "optimizer_state: exp_avg, exp_avg_sq had rows, and none in 3 measured updates" in note
    assert 0 == seen.faults


def cleared(net: nn.Sequential) -> None:
    for module in net.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


def replaced(net: nn.Sequential) -> None:
    for module in net.modules():
        module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()


def cleared_of_one_module(net: nn.Sequential) -> None:
    net[2]._forward_hooks.clear()
    net[2]._forward_pre_hooks.clear()


@pytest.mark.usual(6)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("quantities", [PLAIN, (*PLAIN, "activations")], ids=len)
@pytest.mark.parametrize("take_off", [cleared, replaced, cleared_of_one_module])
def test_hooks_that_other_code_takes_off_are_named_once(take_off, quantities, every):
    net = small()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with watched(net, optimizer, quantities=quantities, every=every) as seen:
        for number in range(1, 10):
            if number == 3:
                take_off(net)
            step(net, optimizer)
    found = seen.messages("note")

    assert 0 == seen.faults
    assert {"grad_reduced", "param_after"} <= kinds(seen, 9)
    if take_off is cleared_of_one_module and (every == 2 or "activations" not in quantities):
        assert [] == found  # this module has no hook between sampled steps
    else:
        assert 1 <= len(found) <= 2
        assert all("other code has removed the" in note for note in found)
    assert len(set(found)) == len(found)
