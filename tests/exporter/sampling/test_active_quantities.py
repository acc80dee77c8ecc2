"""Quantities with different schedules and targets, and plans that grow."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.exporter.runs import config_of, published
from torch import nn

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter import ConfigError, Monitor, MonitorConfig
from rankscope_exporter.sampling.plan import PlanRegistry
from rankscope_exporter.sampling.schedule import Schedule, Timing


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def test_plan_grows_with_called_modules_per_micro_batch():
    """With accumulation over 1, 3 and 2 micro-batches. An evaluation is not part of a step."""
    net, twin = layers(), layers()
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, twin))
    expected = {}
    with Monitor(config_of("parameters", "activations")).attach(net, optimizer) as monitor:
        for step, micros in enumerate((1, 3, 2), 1):
            optimizer.zero_grad()
            other.zero_grad()
            for micro in range(micros):
                value = batch = torch.randn(5, 3)
                net(batch).sum().backward()
                for name, module in twin.named_children():
                    value = module(value)
                    expected[step, name, micro] = float(value.detach().double().norm())
                value.sum().backward()
            optimizer.step()
            other.step()
        with torch.no_grad():
            net.eval()(batch)
        rows = published(monitor).rows
        assert 0 == monitor.faults
    outputs = [(row.entry, row) for row in rows if row.entry.kind == "act_out" and row.entry.tensor]

    assert pytest.approx(expected, rel=1e-6) == {
        (row.step, entry.tensor, entry.micro_step): row.numbers["norm"] for entry, row in outputs
    }


def test_each_quantity_has_its_own_schedule_targets_and_ranks():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {
        "parameters": {"every": 2, "targets": ["0.*"]},
        "gradients": {"start_step": 3, "times": 2, "targets": ["1.weight"]},
        "optimizer_state": {"ranks": [7]},
    }
    with Monitor(config_of(*options, options=options)).attach(net, optimizer) as monitor:
        for _ in range(6):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        rows = published(monitor).rows

    before, after, reduced = "param_before", "param_after", "grad_reduced"
    assert {
        *((step, kind, name) for step in (1, 3, 5) for kind in (before, after) for name in ("0.weight", "0.bias")),
        *((step, kind, "1.weight") for step in (3, 4) for kind in ("grad_unreduced", reduced)),
    } == {(row.step, row.entry.kind, row.entry.tensor) for row in rows}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"options": {"gradient": {}}}, "Did you mean 'gradients'"),
        ({"options": {"optimizer_state": {}}}, "add 'optimizer_state' to quantities"),
        ({"options": {"gradients": {"evry": 2}}}, r"Did you mean options\.gradients\.every"),
        ({"options": {"gradients": {"every": 0}}}, "every must be a whole number of at least 1"),
        ({"options": {"gradients": {"targets": "x"}}}, "targets must be a list of names"),
        ({"options": {"gradients": []}}, "options.gradients must be a table"),
        ({"tensors": ["re:("]}, r"tensors: target 're:\(' is not a valid regular expression"),
    ],
)
def test_invalid_options_raise_with_the_fix(settings, text):
    with pytest.raises(ConfigError, match=text):
        MonitorConfig(quantities=("gradients",), **settings)


def entries(names: str) -> list[PlanEntry]:
    return [PlanEntry(kind="act_out", tensor=name) for name in names]


def names(plan: PlanRegistry) -> list[str]:
    return [entry.tensor for entry in plan.version().entries]


def test_full_plan_counts_rejected_entries():
    plan = PlanRegistry(max_entries=2)

    assert range(1) == plan.add(entries("a"))
    first = plan.version()
    assert range(1, 2) == plan.add(entries("b"))
    assert plan.add(entries("c")) is None
    assert 1 == plan.left_out
    assert first.named.hash != plan.version().named.hash


def test_rows_that_two_quantities_have_are_not_dropped_by_one_of_them():
    """A capture writes to the rows of the suspended quantity, which gets them back."""
    plan = PlanRegistry(max_entries=8)
    rows = plan.add(entries("a"))
    plan.release(rows)
    assert rows == plan.add(entries("a"))
    plan.drop(rows)

    assert ["a"] == names(plan)
    plan.release(rows)
    plan.reclaim(rows)
    plan.drop(rows)
    assert [] == names(plan)


def test_abandoned_rows_are_dropped_unless_another_quantity_gets_them():
    plan = PlanRegistry(max_entries=8)
    rows = [plan.add(entries(name)) for name in "abc"]
    for own in rows[1:]:
        plan.release(own)
        plan.abandon(own)
    plan.abandon(rows[0])  # still in use
    assert rows[1] == plan.add(entries("b"))
    assert [(1, 1), (1, 2)] == [plan.abandoned() for _ in range(2)]
    plan.drop_abandoned()

    assert ["a", "b"] == names(plan)
    assert rows[2] == plan.add(entries("c"))


class TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.middle = nn.Linear(3, 3)
        self.head.weight = self.embedding.weight


def test_targets_select_by_name_glob_or_regular_expression():
    """`head.*` matches the other name of a tensor. A target without a match is reported with the nearest name."""
    net = TiedNet()
    options = {"gradients": {"targets": ["midle.bias", "*"]}}
    tensors = ["middle.wait", "head.*", r"re:mid\w+\.(weight|wait)"]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = config_of("parameters", "gradients", tensors=tensors, options=options)
    with Monitor(config).attach(net, optimizer) as monitor:
        net.head(net.middle(net.embedding(torch.ones(1, 3)))).sum().backward()
        optimizer.step()
        found = published(monitor)

    assert {"embedding.weight", "middle.weight"} == {row.entry.tensor for row in found.rows}
    gradients, parameters = sorted(found.notices)
    assert gradients.startswith("gradients: target 'midle.bias' matches no parameter; nearest: mid")
    assert parameters.startswith("tensors: target 'middle.wait' matches no parameter; nearest: middle.")


# The steps at which a quantity is sampled.


def measured(timing: Timing, steps: Iterable[int]) -> list[int]:
    schedule = Schedule(timing)
    taken = []
    for step in steps:
        if schedule.begins(step):
            schedule.sampled()
            taken.append(step)
    return taken


@given(st.integers(1, 7), st.none() | st.integers(0, 50), st.none() | st.integers(0, 9))
def test_schedule_selects_every_nth_step_from_the_first_on(every, start, times):
    taken = measured(Timing(start_step=start, every=every, times=times), range(40))

    assert list(range(start or 0, 40, every))[:times] == taken


def test_gap_in_step_numbers_does_not_change_the_interval():
    """Resumed at 100 after 1 … 4: steps are counted; only `start_step` compares numbers."""
    assert [3, 100, 102] == measured(Timing(start_step=3, every=2), [1, 2, 3, 4, 100, 101, 102])


def test_due_step_that_was_not_measured_does_not_count():
    schedule = Schedule(Timing(times=1))

    assert schedule.begins(1)
    assert schedule.begins(2)
    schedule.sampled()
    assert schedule.is_over
    assert not schedule.begins(3)
