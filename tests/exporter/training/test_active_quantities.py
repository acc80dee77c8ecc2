"""Quantities with different schedules and targets, and plans that follow tensors which change."""

import math
import random
from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.exporter.parts import config_of, published
from torch import nn

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter import Monitor
from rankscope_exporter.measure.kernels.statistics_table import StatisticsTable
from rankscope_exporter.measure.table import StepTable, Table
from rankscope_exporter.publish.sinks.memory import rows_of
from rankscope_exporter.records.plan import EVERY_OP, ParameterEntries
from rankscope_exporter.records.record import StepRecord
from rankscope_exporter.training.sampling import Schedule
from rankscope_exporter.training.sampling_config import QuantitySampling


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
    found = {(row.step, entry.tensor, entry.micro_step): row.numbers["norm"] for entry, row in outputs}

    assert pytest.approx(expected, rel=1e-6) == found


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


def step_table(**limits: int) -> StepTable:
    return StepTable(StatisticsTable(0, torch.device("cpu")), lambda _: None, **limits)


def entries(names: str) -> list[PlanEntry]:
    return [PlanEntry(kind="act_out", tensor=name) for name in names]


def names(table: StepTable) -> list[str]:
    return [entry.tensor for entry in table.version().entries]


def sampled(table: Table, keys: str) -> None:
    """Request the slots `keys` at a sampled step."""
    table.begin(1)
    for key in keys:
        assert table.add(key, lambda key=key: entries(key)) is not None


def test_full_plan_counts_rejected_entries():
    table = step_table(max_entries=1)

    assert (range(1), None, 1) == (table.add(entries("a")), table.add(entries("b")), table.left_out)


def test_quantity_in_the_place_of_another_one_gets_its_rows():
    table = step_table()
    table.add(entries("abc"))
    table.has_left = True

    assert [(3, 0), range(1, 3)] == [table.add(entries(names)) for names in ("da", "bc")]
    assert ["a", "b", "c", "d"] == names(table)


def test_table_is_built_again_without_slots_that_are_absent_for_long():
    """With three absent slots, the sum of ages after n steps is 3n: from the third step on, it is more than 8."""
    table = step_table()
    own = Table(table, ParameterEntries(), (), EVERY_OP)
    sampled(own, "abcd")
    assert not table.end_step([own])
    found = []
    for _ in range(3):
        sampled(own, "d")
        found.append(table.end_step([own]))
    assert [False, False, True] == found
    table.rebuild([own])
    assert ["d"] == names(table)
    sampled(own, "ad")

    assert ["d", "a"] == names(table)


def test_slots_of_no_quantity_are_dropped():
    table = step_table()
    kept, gone = (Table(table, ParameterEntries(), (), EVERY_OP) for _ in range(2))
    sampled(kept, "a")
    sampled(gone, "b")
    table.find_unused([kept])
    found = []
    for _ in range(9):
        sampled(kept, "a")
        found.append(table.end_step([kept]))
    table.rebuild([kept])

    assert [*[False] * 8, True] == found
    assert ["a"] == names(table)


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


def measured(timing: QuantitySampling, steps: Iterable[int]) -> list[int]:
    schedule = Schedule(timing)
    taken = []
    for step in steps:
        if schedule.begins(step):
            schedule.sampled()
            taken.append(step)
    return taken


@given(st.integers(1, 7), st.none() | st.integers(0, 50), st.none() | st.integers(0, 9))
def test_schedule_selects_every_nth_step_from_the_first_on(every, start, times):
    taken = measured(QuantitySampling(start_step=start, every=every, times=times), range(40))

    assert list(range(start or 0, 40, every))[:times] == taken


def test_gap_in_step_numbers_does_not_change_the_interval():
    """Resumed at 100 after 1 … 4: steps are counted; only `start_step` compares numbers."""
    assert [3, 100, 102] == measured(QuantitySampling(start_step=3, every=2), [1, 2, 3, 4, 100, 101, 102])


Update = Callable[..., None]


def run(net: nn.Module, train: Callable[[Update], None], *quantities: str, momentum: float = 0.0) -> list[StepRecord]:
    """Call `train` with a function that trains a step, one micro-batch per argument; return the measured records."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=momentum)

    def update(*inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.stack([net(item).float().square().mean() for item in inputs]).sum().backward()
        optimizer.step()
        optimizer.state.clear()

    with Monitor(config_of(*quantities)).attach(net, optimizer) as monitor:
        train(update)
        records = published(monitor).records
        assert 0 == monitor.faults
    return [record for record in records if record.statistics is not None]


def embedder(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 3), *more)


def described(record: StepRecord) -> dict[tuple[str, str], tuple[tuple[int, ...], str]]:
    return {(row.entry.kind, row.entry.tensor): (row.entry.shape, row.entry.dtype) for row in rows_of(record)}


def sizes(records: Iterable[StepRecord]) -> list[int]:
    return [len(record.statistics.values) for record in records if record.statistics is not None]


def plans(records: Iterable[StepRecord]) -> set[str]:
    return {record.statistics.plan.hash for record in records if record.statistics is not None}


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 10, shape)


def test_converted_or_resized_parameter_has_its_new_dtype_and_shape():
    net = embedder()

    def train(update: Update) -> None:
        update(tokens(2, 3))
        net.to(torch.bfloat16)
        update(tokens(2, 3))
        net[0].weight.grad = None
        net[0].weight.data = torch.randn(12, 6, dtype=torch.bfloat16)
        update(tokens(2, 3))

    records = run(net, train, "parameters", "gradients", "optimizer_state", "activations", momentum=0.9)
    found = [described(record) for record in records]

    for kind in ("param_before", "param_after", "grad_unreduced", "grad_reduced", "momentum"):
        assert [((10, 6), "float32"), ((10, 6), "bfloat16"), ((12, 6), "bfloat16")] == [
            step[kind, "0.weight"] for step in found
        ]
    assert ((2, 3, 3), "bfloat16") == found[1]["act_out", "1"]
    assert 3 == len(plans(records))


def test_parameter_converted_before_the_first_step_has_its_new_dtype():
    net = embedder()

    def train(update: Update) -> None:
        net[1].to(torch.bfloat16)
        net[0].register_forward_hook(lambda _module, _args, output: output.bfloat16())
        update(tokens(2, 3))

    found = described(run(net, train, "parameters", "gradients")[0])

    assert ((3, 6), "bfloat16") == found["param_after", "1.weight"] == found["grad_reduced", "1.weight"]
    assert ((10, 6), "float32") == found["param_after", "0.weight"] == found["grad_reduced", "0.weight"]


@pytest.mark.parametrize("steps", [40, pytest.param(1000, marks=pytest.mark.thorough)])
def test_sequences_of_random_lengths_make_few_plans(steps):
    random.seed(0)

    def train(update: Update) -> None:
        for _ in range(steps):
            update(*(tokens(2, random.randint(1, 6)) for _ in range(3)))

    records = run(embedder(nn.Tanh()), train, "activations")
    rows = [row for record in records for row in rows_of(record) if not row.entry.shape_varies]

    assert [] == [row.entry for row in rows if math.prod(row.entry.shape) != row.numbers["numel"]]
    assert len(plans(records)) <= 3
    assert 1 == len(set(sizes(records)))


def test_tensor_with_another_shape_and_the_same_size_keeps_no_shape():
    """The compiled kernel reads the address and the size only."""

    def train(update: Update) -> None:
        for shape in ((2, 6), (4, 3), (4, 3)):
            update(tokens(*shape))

    records = run(embedder(), train, "activations")

    assert [(2, 6, 3), ()] == [described(record)["act_out", "1"][0] for record in records[:2]]


def test_entries_of_one_long_episode_leave_the_plan():
    def train(update: Update) -> None:
        for step in range(1, 14):
            update(*(torch.ones(1, 4) for _ in range(60 if step in (3, 11) else 4)))

    records = run(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), train, "activations", "micro_gradients")
    size = sizes(records)
    outputs = [row for r in records for row in rows_of(r, ("act_out",)) if row.entry.tensor == "2"]

    assert size[1] == size[9] == size[12]
    assert size[2] == size[10] > 10 * size[1]
    assert set(range(60)) <= {row.entry.micro_step for row in rows_of(records[10])}
    assert 4 * 11 + 60 * 2 == len(outputs)


def test_modules_that_take_turns_remain_in_the_plan():
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.is_first = nn.Linear(4, 4), nn.Linear(4, 4), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.is_first = not self.is_first
            return (self.first if self.is_first else self.second)(x)

    def train(update: Update) -> None:
        for _ in range(20):
            update(torch.ones(1, 4))

    assert 2 == len(plans(run(Turns(), train, "activations")))
