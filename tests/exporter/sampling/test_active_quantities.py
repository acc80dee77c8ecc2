"""Quantities with different schedules, plans that grow, and rows outside of the table."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter import ConfigError, Monitor, MonitorConfig, quantities
from rankscope_exporter.quantities.base import Hooking, Quantity, SamplingGate, Table
from rankscope_exporter.quantities.parameters import Parameters
from rankscope_exporter.sampling.plan import PlanRegistry
from rankscope_exporter.statistics import HostCopy, MeasureGroup, StatisticsTable, finish


class Outputs(Parameters):
    """Outputs of modules. Not a direct subclass of Quantity: those are always selectable."""

    name: ClassVar[str] = "test_outputs"
    of_modules: ClassVar[bool] = True
    on_optimizer_step_begin = on_optimizer_step_end = Quantity.on_step_begin

    def entries(self) -> list[PlanEntry]:
        return []

    def install(self, hooking: Hooking, gate: SamplingGate) -> None:
        for name, module in self.monitored.framework.module.named_modules():
            if name and self.targets.selects(name):

                def read(_module: Any, _inputs: Any, output: torch.Tensor, name: str = name) -> None:
                    if hooking.in_forward:
                        self._read(name, hooking.micro_step, output, gate.table)

                hooking.keep(module.register_forward_hook(hooking.guarded("outputs", read, gate)))

    def _read(self, name: str, micro_step: int, output: torch.Tensor, table: Table) -> None:
        entries = [PlanEntry(kind="act_out", tensor=name, micro_step=micro_step)]
        rows = table.add((name, micro_step), lambda: entries)
        if rows is not None:
            table.measure([output], rows)
        table.defer("features", output.amax(), lambda most: [feature(name, micro_step, float(most))])
        table.write("modules", {"module": name, "class": "Linear"})


def feature(name: str, micro_step: int, value: float) -> dict[str, Any]:
    return {"kind": "largest", "module": name, "micro_step": micro_step, "value": value}


@pytest.fixture
def _with_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {**quantities.quantity_classes(), Outputs.name: Outputs}
    monkeypatch.setattr(quantities, "quantity_classes", lambda: classes)


def train(net: nn.Module, batches: list[list[torch.Tensor]]) -> list[list[dict[str, torch.Tensor]]]:
    """Train with accumulation; return the output of each module, by step and micro-batch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: list[list[dict[str, torch.Tensor]]] = []
    for micros in batches:
        optimizer.zero_grad()
        seen.append([])
        for batch in micros:
            found: dict[str, torch.Tensor] = {}
            value = batch
            for name, module in net.named_children():
                value = found[name] = module(value)
            seen[-1].append(found)
            value.sum().backward()
        optimizer.step()
    return seen


@pytest.mark.usefixtures("_with_outputs")
def test_plan_grows_with_called_modules_per_micro_batch(reader, eventually):
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))  # noqa: E731 - two equal models
    net, twin = make(), make()
    twin.load_state_dict(net.state_dict())
    batches = [[torch.randn(5, 3) for _ in range(micros)] for micros in (1, 3, 2)]
    expected = train(twin, batches)
    config = MonitorConfig(quantities=("parameters", "test_outputs"), console=False, exit_wait_seconds=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Monitor(config).attach(net, optimizer) as monitor:
        read = reader(monitor)
        for micros in batches:
            optimizer.zero_grad()
            for batch in micros:
                net(batch).sum().backward()
            optimizer.step()
        with torch.no_grad():
            net.eval()(batches[0][0])  # an evaluation is not part of a step
        monitor.end_step()
        records = eventually(lambda: [r for r in read.records() if r["step"] == 3] and read.records())

        norms = {
            (row.step, row.tensor, row.micro_step): row.numbers["norm"] for row in read.rows() if row.kind == "act_out"
        }
        assert 0 == monitor.faults
    wanted = {
        (step, name, micro): float(found[name].detach().double().norm())
        for step, micros in enumerate(expected, 1)
        for micro, found in enumerate(micros)
        for name in found
    }
    assert wanted.keys() == norms.keys()
    assert all(wanted[key] == pytest.approx(norms[key], rel=1e-6) for key in wanted)
    features = {(r["step"], f["module"], f["micro_step"]): f["value"] for r in records for f in r["features"] or ()}
    assert wanted.keys() == features.keys()
    assert float(expected[1][2]["1"].max()) == pytest.approx(features[2, "1", 2])
    assert 12 == sum(len(record["modules"] or ()) for record in records)


def test_each_quantity_has_its_own_schedule_targets_and_ranks(reader, eventually):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = MonitorConfig(
        quantities=("parameters", "gradients", "optimizer_state"),
        options={
            "parameters": {"every": 2, "targets": ["0.*"]},
            "gradients": {"start_step": 3, "times": 2, "targets": ["1.weight"]},
            "optimizer_state": {"ranks": [7]},
        },
        console=False,
        exit_wait_seconds=0,
    )
    with Monitor(config).attach(net, optimizer) as monitor:
        read = reader(monitor)
        for _ in range(6):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.end_step()
        rows = eventually(lambda: [row for row in read.rows() if row.step == 5] and read.rows())
        found = {(row.step, row.kind, row.tensor) for row in rows}

    assert {1, 3, 5} == {step for step, kind, _ in found if kind == "param_after"}
    assert {3, 4} == {step for step, kind, _ in found if kind == "grad_reduced"}
    assert {"0.weight", "0.bias"} == {tensor for _, kind, tensor in found if kind == "param_before"}
    assert {"1.weight"} == {tensor for _, kind, tensor in found if kind.startswith("grad_")}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gradient": {}}, "Did you mean 'gradients'"),
        ({"optimizer_state": {}}, "add 'optimizer_state' to quantities"),
        ({"gradients": {"evry": 2}}, r"Did you mean options\.gradients\.every"),
        ({"gradients": {"every": 0}}, "every must be a whole number of at least 1"),
        ({"gradients": {"targets": "x"}}, "targets must be a list of names"),
        ({"gradients": []}, "options.gradients must be a table"),
    ],
)
def test_invalid_options_raise_with_the_fix(options, text):
    with pytest.raises(ConfigError, match=text):
        MonitorConfig(quantities=("gradients",), options=options)


def test_growing_table_keeps_its_statistics():
    table = StatisticsTable(1, torch.device("cpu"))
    MeasureGroup(range(1)).measure([torch.tensor([3.0, 4.0])], table)
    early = HostCopy(table, 1)
    MeasureGroup(range(1)).measure([torch.tensor([3.0, 4.0])], table)
    table.grow(70)
    MeasureGroup(range(69, 70)).measure([torch.ones(9)], table)
    late = finish(HostCopy(table, 70))

    assert [5.0] == finish(early).values[0].tolist()
    assert (5.0, 3.0) == (float(late.values[0, 0]), float(late.values[0, 69]))
    assert [0, 69] == late.present.nonzero()[0].tolist()


def test_full_plan_counts_rejected_entries():
    book = PlanRegistry(max_entries=2)

    assert range(1) == book.add([PlanEntry(kind="act_out", tensor="a")])
    first = book.version()
    assert range(1, 2) == book.add([PlanEntry(kind="act_out", tensor="b")])
    assert book.add([PlanEntry(kind="act_out", tensor="c")]) is None
    assert 1 == book.left_out
    assert first.named.hash != book.version().named.hash


def test_rows_that_two_quantities_have_are_not_dropped_by_one_of_them():
    """A capture writes to the rows of the suspended quantity, which gets them back."""
    book = PlanRegistry(max_entries=8)
    rows = book.add([PlanEntry(kind="act_out", tensor="a")])
    book.release(rows)
    assert rows == book.add([PlanEntry(kind="act_out", tensor="a")])
    book.drop(rows)

    assert ["a"] == [entry.tensor for entry in book.version().entries]
    book.release(rows)
    book.reclaim(rows)
    book.drop(rows)
    assert [] == list(book.version().entries)


def test_abandoned_rows_are_dropped_unless_another_quantity_gets_them():
    book = PlanRegistry(max_entries=8)
    rows = [book.add([PlanEntry(kind="act_out", tensor=name)]) for name in "abc"]
    for own in rows[1:]:
        book.release(own)
        book.abandon(own)
    book.abandon(rows[0])  # still in use
    assert rows[1] == book.add([PlanEntry(kind="act_out", tensor="b")])
    assert (1, 1) == book.abandoned()
    assert (1, 2) == book.abandoned()
    book.drop_abandoned()

    assert ["a", "b"] == [entry.tensor for entry in book.version().entries]
    assert rows[2] == book.add([PlanEntry(kind="act_out", tensor="c")])


class TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(3, 3, bias=False)
        self.middle = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (["*"], {"embedding.weight", "middle.weight", "middle.bias"}),
        (["*.weight"], {"embedding.weight", "middle.weight"}),
        (["head.*"], {"embedding.weight"}),  # its other name
        (["middle.bias"], {"middle.bias"}),
        ([r"re:mid\w+\.(weight|bias)"], {"middle.weight", "middle.bias"}),
    ],
)
def test_targets_select_by_name_glob_or_regular_expression(tensors, expected, reader, eventually):
    net = TiedNet()
    config = MonitorConfig(quantities=("parameters",), tensors=tensors, console=False, exit_wait_seconds=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Monitor(config).attach(net, optimizer) as monitor:
        read = reader(monitor)
        net.head(net.middle(net.embedding(torch.ones(1, 3)))).sum().backward()
        optimizer.step()
        monitor.end_step()
        rows = eventually(read.rows)

    assert expected == {row.tensor for row in rows}


def test_target_without_a_match_reports_the_nearest_name(reader, eventually):
    net = TiedNet()
    config = MonitorConfig(
        quantities=("parameters", "gradients"),
        tensors=["middle.wait", "*"],
        options={"gradients": {"targets": ["midle.bias", "middle.*"]}},
        console=False,
        exit_wait_seconds=0,
    )
    with Monitor(config).attach(net, torch.optim.SGD(net.parameters(), lr=0.1)) as monitor:
        notes = eventually(lambda: len(found := reader(monitor).events()) == 2 and found)
        texts = {note["message"] for note in notes}

    assert any(
        text.startswith("tensors: target 'middle.wait' matches no parameter; nearest: middle.") for text in texts
    )
    assert any(text.startswith("gradients: target 'midle.bias' matches no parameter; nearest: mid") for text in texts)


def test_invalid_pattern_raises_at_construction():
    with pytest.raises(ConfigError, match=r"tensors: target 're:\(' is not a valid regular expression"):
        MonitorConfig(tensors=["re:("])
