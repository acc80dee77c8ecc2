"""Kinds of rows that are configured and absent are named once; kinds that are absent by definition are not named."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.exporter.parts import records_of, session_of
from torch import nn

from rankscope_exporter import Monitor
from rankscope_exporter.sinks.memory import rows_of

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


class Watched:
    """The kinds of rows by step, and the notices of a monitor."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self.session = session_of(monitor)

    def notes(self) -> list[str]:
        self._monitor.end_step()
        self.session.publisher.catch_up(30)
        events = [event for record in records_of(self.session) for event in record.events]
        return [event.message for event in events if event.type == "note"]

    def kinds(self, step: int) -> set[str]:
        self.session.publisher.catch_up(30)
        records = [record for record in records_of(self.session) if record.step == step]
        rows = {row["kind"] for record in records for row in (*record.features, *record.histograms)}
        return rows | {str(row.entry.kind) for record in records for row in rows_of(record, ())}


@contextmanager
def watched(net: nn.Module, *optimizers: torch.optim.Optimizer, quantities: Any = ALL, **settings: Any) -> Any:
    config = {"quantities": list(quantities), "console": False, "exit_wait_seconds": 0.0, **settings}
    with Monitor(config).attach(net, optimizers) as monitor:
        yield Watched(monitor)
        assert monitor.faults == 0


def notes_after(steps: int, make: Callable[[nn.Module], torch.optim.Optimizer], **settings: Any) -> list[str]:
    net = small()
    optimizer = make(net)
    with watched(net, optimizer, **settings) as seen:
        for _ in range(steps):
            step(net, optimizer)
        return list(seen.notes())


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
    notes = []
    with watched(net, optimizer, quantities=quantities) as seen:
        for steps in (2, 6):
            for _ in range(steps):
                step(net, optimizer)
            notes.append(seen.notes())
    early, late = notes

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
        published = seen.kinds(2)
        hashes = [row for record in records_of(seen.session) for row in record.hashes if row["dtype"] != "float32"]

    usual = {"param_before", "param_after", "grad_unreduced", "grad_reduced"}
    assert published - usual <= {"step", "absmax1"}
    assert hashes
    assert {None} == {row["norm"] for row in hashes}


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
    assert [] == notes_after(6, OPTIMIZERS[name])


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
        notes = seen.notes()

    assert [] == notes


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
        notes = seen.notes()

    assert 1 == len(notes)
    assert "optimizer_state: exp_avg, exp_avg_sq had rows, and none in 3 measured updates" in notes[0]


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
        notes, kinds = seen.notes(), seen.kinds(9)

    assert {"grad_reduced", "param_after"} <= kinds
    if take_off is cleared_of_one_module and (every == 2 or "activations" not in quantities):
        assert [] == notes  # this module has no hook between sampled steps
    else:
        assert 1 <= len(notes) <= 2
        assert all("other code has removed the" in note for note in notes)
    assert len(set(notes)) == len(notes)
