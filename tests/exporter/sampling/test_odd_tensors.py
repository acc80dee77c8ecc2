"""A tensor without computable statistics costs its own rows only, and is named once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
import torch
from tests.exporter.runs import config_of, published
from torch import nn

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter import Monitor
from rankscope_exporter.sampling.plan import PlanRegistry
from rankscope_exporter.sampling.table_view import Measurement, StepBuffers, TableView
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


Step = Callable[..., None]
PLAIN = {"first.weight", "first.bias", "last.weight", "last.bias"}


@contextmanager
def trained(base: torch.Tensor, *quantities: str, **options: Any) -> Iterator[tuple[nn.Module, Monitor, Step]]:
    """Yield a model with a frozen weight `base`, its monitor, and a function that trains a step."""
    torch.manual_seed(0)
    net = Adapted(nn.Parameter(base, requires_grad=False))
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)

    def step(before_update: Callable[[], None] = lambda: None) -> None:
        optimizer.zero_grad()
        net(torch.ones(1, 4)).square().sum().backward()
        before_update()
        optimizer.step()

    with Monitor(config_of(*quantities, options=options)).attach(net, optimizer) as monitor:
        yield net, monitor, step
        assert 0 == monitor.faults


def test_wrapped_weight_among_others_costs_its_own_rows():
    options = {"parameters": {"updates": True}, "hashes": {"of": "all", "every": 1}}
    with trained(Codes(torch.ones(3, 2, dtype=torch.int8)), *options, **options) as (net, monitor, step):
        for _ in range(5):
            step()
        found = published(monitor)
    norms = found.norms("param_after")

    assert {(number, name) for number in range(1, 6) for name in PLAIN} == norms.keys()
    assert PLAIN == {row["module"] for row in found.of("features") if row["step"] == 5}
    assert PLAIN == {row["tensor"] for row in found.of("hashes") if (row["step"], row["kind"]) == (5, "param_after")}
    assert 1 == sum(message.startswith("param_before of base cannot") for message in found.notices)
    assert float(net.last.weight.detach().double().norm()) == pytest.approx(norms[5, "last.weight"])


def test_first_parameter_on_meta_leaves_the_others_measured():
    with trained(torch.empty(5, 5, device="meta"), "parameters") as (_, monitor, step):
        step()
        norms = published(monitor).norms("param_after")

    assert PLAIN == {name for _, name in norms}


def test_wrapped_moment_costs_its_own_rows():
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    def encode(*_: Any) -> None:
        optimizer.state[net[0].weight]["exp_avg"] = Codes(torch.ones(6, 4, dtype=torch.int8))

    optimizer.register_step_post_hook(encode)  # before the hook of the monitor
    with Monitor(config_of("optimizer_state", "adam_updates")).attach(net, optimizer) as monitor:
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        found = published(monitor)
        assert 0 == monitor.faults

    others = {"0.bias", "1.weight", "1.bias"}
    kinds = {(row.entry.kind, row.entry.tensor) for row in found.rows}
    assert {(kind, name) for kind in ("exp_avg", "exp_avg_sq") for name in others} <= kinds
    assert ("exp_avg", "0.weight") not in kinds
    assert others == {row["tensor"] for row in found.of("histograms")}


def test_gradient_of_inference_mode_is_published_as_clipped():
    with trained(torch.ones(1), "gradients") as (net, monitor, step):

        def clip() -> None:
            with torch.inference_mode():
                for parameter in net.parameters():
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad * 0.5

        step(clip)
        found = published(monitor)

    halves = {key: norm / 2 for key, norm in found.norms("grad_reduced").items()}
    assert PLAIN == {name for _, name in halves}
    assert pytest.approx(halves) == found.norms("grad_clipped")


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
    """The tensor is measured again after many steps, or with another dtype."""
    told: list[str] = []
    isolation, tensors = Isolation(told.append), [torch.ones(2) for _ in range(4)]

    def at(step: int, error: Exception) -> bool:
        isolation.begin(step)
        return 1 in failing(isolation, tensors, error)

    errors = [*[ValueError()] * 2, KeyError(), *[ValueError()] * (FAILURES_IN_A_ROW + 1)]
    assert [*[True] * 6, False] == [at(step, error) for step, error in enumerate(errors, 1)]
    assert [False, *[True] * 3, False] == [at(LEFT_OUT_STEPS + step, ValueError()) for step in range(5, 10)]
    tensors[1] = torch.ones(2, dtype=torch.bfloat16)
    assert at(10 + LEFT_OUT_STEPS, ValueError())
    assert ["norm of 1 cannot be measured and is absent: ValueError()"] == told


OUT_OF_MEMORY = [torch.OutOfMemoryError("CUDA"), MemoryError(), RuntimeError("can't allocate memory")]


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
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
