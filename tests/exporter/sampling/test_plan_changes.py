"""The plan follows tensors that change their shape or dtype, and entries that are no longer measured leave it."""

from __future__ import annotations

import math
import random

import pytest
import torch
from tests.exporter.parts import records_of, session_of
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.records.step_record import StepRecord
from rankscope_exporter.sinks.memory import rows_of
from rankscope_exporter.statistics import warm_up


def attached(net: nn.Module, optimizer: torch.optim.Optimizer, *quantities: str) -> Monitor:
    config = MonitorConfig(quantities=quantities, console=False, exit_wait_seconds=0)
    return Monitor(config).attach(net, optimizer)


def published(monitor: Monitor) -> list[StepRecord]:
    monitor.end_step()
    session = session_of(monitor)
    assert session.publisher.catch_up(30)
    assert 0 == monitor.faults
    return [record for record in records_of(session) if record.statistics is not None]


def described(record: StepRecord) -> dict[tuple[str, str], tuple[tuple[int, ...], str]]:
    return {(row.entry.kind, row.entry.tensor): (row.entry.shape, row.entry.dtype) for row in rows_of(record)}


def wrong_shapes(records: list[StepRecord]) -> list[object]:
    return [
        (row.step, row.entry)
        for record in records
        for row in rows_of(record)
        if not row.entry.shape_varies and math.prod(row.entry.shape) != row.numbers["numel"]
    ]


def size(record: StepRecord) -> int:
    assert record.statistics is not None
    return len(record.statistics.values)


def update(net: nn.Module, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    torch.stack([net(item).float().square().mean() for item in inputs]).sum().backward()
    optimizer.step()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 10, shape)


def test_converted_or_resized_parameter_has_its_new_dtype_and_shape():
    net = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    with attached(net, optimizer, "parameters", "gradients", "optimizer_state", "activations") as monitor:
        update(net, optimizer, tokens(2, 3))
        net.to(torch.bfloat16)
        optimizer.state.clear()
        update(net, optimizer, tokens(2, 3))
        net[0].weight.grad = None
        optimizer.state.clear()
        net[0].weight.data = torch.randn(12, 6, dtype=torch.bfloat16)
        update(net, optimizer, tokens(2, 3))
        records = published(monitor)
    found = [described(record) for record in records]
    kinds = ("param_before", "param_after", "grad_unreduced", "grad_reduced", "momentum")

    for kind in kinds:
        assert ((10, 6), "float32") == found[0][kind, "0.weight"]
        assert ((10, 6), "bfloat16") == found[1][kind, "0.weight"]
        assert ((12, 6), "bfloat16") == found[2][kind, "0.weight"]
    assert ((2, 3, 3), "bfloat16") == found[1]["act_out", "1"]
    assert 3 == len({record.statistics.plan.hash for record in records if record.statistics is not None})


def test_parameter_converted_before_the_first_step_has_its_new_dtype():
    net = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with attached(net, optimizer, "parameters", "gradients") as monitor:
        net[1].to(torch.bfloat16)
        optimizer.zero_grad()
        net[1](net[0](tokens(2, 3)).bfloat16()).float().square().sum().backward()
        optimizer.step()
        (record,) = published(monitor)
    found = described(record)

    assert ((3, 6), "bfloat16") == found["param_after", "1.weight"] == found["grad_reduced", "1.weight"]
    assert ((10, 6), "float32") == found["param_after", "0.weight"] == found["grad_reduced", "0.weight"]


@pytest.mark.parametrize(
    ("micro_batches", "steps"), [(1, 100), (3, 100), pytest.param(3, 1000, marks=pytest.mark.thorough)]
)
def test_sequences_of_random_lengths_make_few_plans(micro_batches, steps):
    random.seed(0)
    net = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 3), nn.Tanh())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with attached(net, optimizer, "activations") as monitor:
        for _ in range(steps):
            update(net, optimizer, *(tokens(2, random.randint(1, 6)) for _ in range(micro_batches)))
        records = published(monitor)

    assert [] == wrong_shapes(records)
    assert len({record.statistics.plan.hash for record in records if record.statistics is not None}) <= 3
    assert {size(records[0])} == {size(record) for record in records}


def test_tensor_with_another_shape_and_the_same_size_keeps_no_shape():
    thread = warm_up()
    if thread is not None:  # the compiled kernel reads the address and the size only
        thread.join()
    net = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with attached(net, optimizer, "activations") as monitor:
        for shape in ((2, 6), (4, 3), (4, 3)):
            update(net, optimizer, tokens(*shape))
        records = published(monitor)

    assert (2, 6, 3) == described(records[0])["act_out", "1"][0]
    assert () == described(records[1])["act_out", "1"][0]


def test_entries_of_one_long_episode_leave_the_plan():
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with attached(net, optimizer, "activations", "micro_gradients") as monitor:
        for step in range(1, 13):
            update(net, optimizer, *(torch.ones(1, 4) for _ in range(60 if step in (3, 11) else 4)))
        records = published(monitor)
    sizes = [size(record) for record in records]

    assert sizes[1] == sizes[9] == sizes[11]
    assert sizes[2] == sizes[10] > 10 * sizes[1]
    norms = {(row.step, row.entry.micro_step): row.numbers["norm"] for row in rows_of(records[10])}
    assert set(range(60)) <= {micro_step for _, micro_step in norms}
    assert 4 * 10 + 60 * 2 == sum(
        row.entry.kind == "act_out" and row.entry.tensor == "2" for r in records for row in rows_of(r)
    )


def test_modules_that_take_turns_remain_in_the_plan():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.is_first = first, second, True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.first if self.is_first else self.second)(x)

    net = Turns()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with attached(net, optimizer, "activations") as monitor:
        for step in range(20):
            net.is_first = step % 2 == 0
            update(net, optimizer, torch.ones(1, 4))
        records = published(monitor)

    assert 2 == len({record.statistics.plan.hash for record in records if record.statistics is not None})
