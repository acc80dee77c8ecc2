"""A tensor without computable statistics costs its own rows only, and is named once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
import torch
from tests.exporter.parts import records_of, session_of
from torch import nn

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.sampling.plan import PlanRegistry
from rankscope_exporter.sampling.table_view import Measurement, StepBuffers, TableView
from rankscope_exporter.sinks.memory import Row, rows_of
from rankscope_exporter.statistics import StatisticsTable
from rankscope_exporter.statistics.isolation import FAILURES_IN_A_ROW, LEFT_OUT_STEPS, Isolation
from rankscope_exporter.statistics.selection import EVERY_OP


class Codes(torch.Tensor):
    """A wrapper of integer codes that knows few operations, as the weights and moments of torchao."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Codes(args[0].codes)
        raise NotImplementedError(f"Codes has no {func}")


class Adapted(nn.Module):
    def __init__(self, base: nn.Parameter) -> None:
        super().__init__()
        self.base = base
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def odd_weight() -> nn.Parameter:
    return nn.Parameter(Codes(torch.ones(3, 2, dtype=torch.int8)), requires_grad=False)


class Run:
    """A monitored training of `Adapted`."""

    def __init__(self, base: nn.Parameter, *quantities: str, **options: Any) -> None:
        self.net = Adapted(base)
        self.optimizer = torch.optim.AdamW([p for p in self.net.parameters() if p.requires_grad], lr=0.01)
        config = MonitorConfig(quantities=quantities, options=options, console=False, exit_wait_seconds=0)
        self.monitor = Monitor(config).attach(self.net, self.optimizer)

    def step(self, before_update: Callable[[], None] = lambda: None) -> None:
        self.optimizer.zero_grad()
        self.net(torch.ones(1, 4)).square().sum().backward()
        before_update()
        self.optimizer.step()

    def read(self) -> tuple[list[Row], list[str]]:
        self.monitor.end_step()
        session = session_of(self.monitor)
        assert session.publisher.catch_up(20)
        records = records_of(session)
        messages = [event.message for record in records for event in record.events]
        return [row for record in records for row in rows_of(record)], messages


@contextmanager
def trained(base: nn.Parameter, *quantities: str, **options: Any) -> Iterator[Run]:
    torch.manual_seed(0)
    run = Run(base, *quantities, **options)
    with run.monitor:
        yield run
        assert 0 == run.monitor.faults


PLAIN = {"first.weight", "first.bias", "last.weight", "last.bias"}


def test_wrapped_weight_among_others_costs_its_own_rows():
    with trained(
        odd_weight(), "parameters", "hashes", parameters={"updates": True}, hashes={"of": "all", "every": 1}
    ) as run:
        for _ in range(5):
            run.step()
        rows, messages = run.read()
        last = next(item for item in records_of(session_of(run.monitor)) if item.step == 5 and item.statistics)

    assert {(step, name) for step in range(1, 6) for name in PLAIN} == {
        (row.step, row.entry.tensor) for row in rows if row.entry.kind == "param_after"
    }
    assert PLAIN == {row["module"] for row in last.features}
    assert PLAIN == {row["tensor"] for row in last.hashes if row["kind"] == "param_after"}
    assert 1 == sum(message.startswith("param_before of base cannot") for message in messages)
    weight = next(
        row for row in rows if (row.step, row.entry.tensor, row.entry.kind) == (5, "last.weight", "param_after")
    )
    expected = float(run.net.last.weight.detach().double().norm())
    assert expected == pytest.approx(weight.numbers["norm"])


def test_first_parameter_on_meta_leaves_the_others_measured():
    with trained(nn.Parameter(torch.empty(5, 5, device="meta"), requires_grad=False), "parameters") as run:
        run.step()
        rows, _ = run.read()

    assert PLAIN == {row.entry.tensor for row in rows if row.entry.kind == "param_after"}


def test_wrapped_moment_costs_its_own_rows():
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    def encode(*_: Any) -> None:
        optimizer.state[net[0].weight]["exp_avg"] = Codes(torch.ones(6, 4, dtype=torch.int8))

    optimizer.register_step_post_hook(encode)  # before the hook of the monitor
    config = MonitorConfig(quantities=("optimizer_state", "adam_updates"), console=False, exit_wait_seconds=0)
    with Monitor(config).attach(net, optimizer) as monitor:
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        monitor.end_step()
        assert session_of(monitor).publisher.catch_up(20)
        record = next(item for item in records_of(session_of(monitor)) if item.statistics is not None)
        assert 0 == monitor.faults

    others = {"0.bias", "1.weight", "1.bias"}
    kinds = {(row.entry.kind, row.entry.tensor) for row in rows_of(record)}
    assert {(kind, name) for kind in ("exp_avg", "exp_avg_sq") for name in others} <= kinds
    assert ("exp_avg", "0.weight") not in kinds
    assert others == {row["tensor"] for row in record.histograms}


def test_gradient_of_inference_mode_is_published_as_clipped():
    def clip() -> None:
        with torch.inference_mode():
            for parameter in run.net.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * 0.5

    with trained(nn.Parameter(torch.ones(1), requires_grad=False), "gradients") as run:
        run.step(clip)
        rows, _ = run.read()

    norms = {(row.entry.kind, row.entry.tensor): row.numbers["norm"] for row in rows}
    assert all(norms["grad_reduced", name] == pytest.approx(2 * norms["grad_clipped", name]) for name in PLAIN)


def failing(isolation: Isolation, tensors: list[torch.Tensor], error: Exception) -> list[int]:
    """Measure `tensors`, of which number 1 raises `error`. Return the positions for which `compute` was called."""
    tried: list[int] = []

    def compute(positions: Any) -> None:
        tried.extend(positions)
        if 1 in positions:
            raise error

    isolation.run("rows", tensors, compute, what=lambda: "norm", name=str)
    return tried


def test_same_error_three_steps_in_a_row_leaves_the_tensor_out():
    told: list[str] = []
    isolation, tensors = Isolation(told.append), [torch.ones(2) for _ in range(4)]

    def at(step: int, error: Exception) -> bool:
        isolation.begin(step)
        return 1 in failing(isolation, tensors, error)

    assert at(1, ValueError())
    assert at(2, ValueError())
    assert at(3, KeyError())  # another error: the count restarts
    assert all(at(4 + more, ValueError()) for more in range(FAILURES_IN_A_ROW))
    assert not at(7, ValueError())
    assert not at(6 + LEFT_OUT_STEPS - 1, ValueError())
    assert at(6 + LEFT_OUT_STEPS, ValueError())
    assert at(7 + LEFT_OUT_STEPS, ValueError())
    assert at(8 + LEFT_OUT_STEPS, ValueError())
    assert not at(9 + LEFT_OUT_STEPS, ValueError())
    tensors[1] = torch.ones(2, dtype=torch.bfloat16)
    assert at(10 + LEFT_OUT_STEPS, ValueError())
    assert ["norm of 1 cannot be measured and is absent: ValueError()"] == told


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), MemoryError(), RuntimeError("can't allocate memory")]
)
def test_out_of_memory_leaves_no_tensor_out(error):
    isolation, tensors = Isolation(lambda _: None), [torch.ones(2) for _ in range(4)]
    for step in range(6):
        isolation.begin(step)

        assert 1 in failing(isolation, tensors, error)


def test_error_keeps_no_tensor_of_the_failed_batch_alive():
    isolation, tensors = Isolation(lambda _: None), [torch.ones(2)]
    alive = weakref.ref(tensors[0])

    def compute(_: Any) -> None:
        copy = tensors[0]
        raise ValueError(copy.shape)

    gc.disable()
    try:
        isolation.run("rows", tensors, compute, what=lambda: "norm", name=str)
        tensors.clear()
        assert alive() is None
    finally:
        gc.enable()


def test_failed_batch_keeps_the_rows_of_tensors_that_it_does_not_measure():
    buffers = StepBuffers(PlanRegistry(), StatisticsTable(2, torch.device("cpu")), Measurement(), lambda _: None)
    view = TableView(buffers, [PlanEntry(kind="grad_clipped", tensor=name) for name in "ab"], [0, 1], EVERY_OP)
    view.begin(1)
    view.measure([torch.ones(3), None], range(2))
    view.measure([None, Codes(torch.ones(3, dtype=torch.int8))], range(2))

    assert [True, False] == buffers.table.look(2, EVERY_OP).present.tolist()
