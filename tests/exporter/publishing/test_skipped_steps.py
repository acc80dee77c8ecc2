"""Which steps without an update are reported as skipped, and when."""

from __future__ import annotations

import pytest
import torch
from tests.exporter.parts import Watched

from rankscope_exporter.publishing.publisher import MOST_PASSES, SkippedSteps
from rankscope_exporter.records.pending_step import PendingStep


def reported(steps: str, *, is_over: bool = True) -> tuple[list[int | None], list[str]]:
    """Return the reported steps and the notices after `steps`: "s" is a skipped step, "u" one with an update."""
    found: list[int | None] = []
    notices: list[str] = []
    skipped = SkippedSteps(lambda record: found.append(record.step), notices.append)
    for step, kind in enumerate(steps, 1):
        if kind == "s":
            skipped.skipped(PendingStep(step, ts=step))
        else:
            skipped.updated()
    if is_over:
        skipped.finish()
    return found, notices


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("uuu", []),
        ("s", [1]),
        ("su", [1]),
        ("suuusuu", [1, 5]),
        ("usssu", [2, 3, 4]),
        ("ssusuu", [1, 2, 4]),
        ("s" * (MOST_PASSES + 1) + "u", list(range(1, MOST_PASSES + 2))),
        ("susususu", []),
        ("ssussussu", []),
        ("uuusususuuuu", []),
        ("susus", []),
        ("susususssu", [7, 8, 9]),
        ("sususuuusuu", [9]),
    ],
)
def test_skipped_steps_are_reported_unless_their_number_is_repeated(steps, expected):
    assert expected == reported(steps)[0]


@pytest.mark.parametrize(("steps", "expected"), [("us", []), ("usu", []), ("usuu", [2]), ("susuus", [])])
def test_skipped_step_is_reported_at_the_second_update_after_it(steps, expected):
    assert expected == reported(steps, is_over=False)[0]


@pytest.mark.parametrize(("steps", "count"), [("suuu", 0), ("ssusu", 0), ("susu", 1), ("sususuususu", 1)])
def test_repeated_number_of_skipped_steps_is_named_once(steps, count):
    assert count == len(reported(steps)[1])


def test_skipped_step_without_measured_tensors_is_published():
    net = torch.nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(net.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
    options = {"hashes": {"every": 1, "of": "all"}}
    with Watched(net, optimizer, quantities=["hashes"], options=options) as seen:
        for factor in (1.0, float("inf"), 1.0):
            scaler.scale(factor * net(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    assert {1, 2, 3} <= {record.step for record in seen.records}
    assert 0 == seen.faults
