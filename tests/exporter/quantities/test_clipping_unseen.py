"""Gradients that change without a change of their version are published as clipped at each sampled step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.exporter.parts import records_of, session_of
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.sinks.memory import rows_of


def through_data(gradient: torch.Tensor) -> None:
    gradient.data.mul_(0.5)


def by_foreach(gradient: torch.Tensor) -> None:
    torch._foreach_mul_([gradient.data], 0.5)


def replaced_data(gradient: torch.Tensor) -> None:
    gradient.data = gradient.data * 0.5


def through_numpy(gradient: torch.Tensor) -> None:
    gradient.numpy()[...] *= 0.5


@pytest.mark.parametrize("scale", [through_data, by_foreach, replaced_data, through_numpy])
@pytest.mark.parametrize("clipped_steps", [{10, 11}, {2, 5}])
def test_clipping_without_a_new_version_is_found_at_each_step(
    scale: Callable[[torch.Tensor], None], clipped_steps: set[int]
) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    config = MonitorConfig(quantities=("gradients",), console=False, exit_wait_seconds=0)
    expected: dict[tuple[int, str, str], float] = {}
    with Monitor(config).attach(net, optimizer) as monitor:
        for step in range(1, 13):
            optimizer.zero_grad()
            net(torch.randn(2, 4)).square().sum().backward()
            for kind in ("grad_reduced", "grad_clipped"):
                for name, parameter in net.named_parameters():
                    assert parameter.grad is not None
                    expected[step, kind, name] = float(parameter.grad.double().norm())
                    if kind == "grad_reduced" and step in clipped_steps:
                        scale(parameter.grad)
            optimizer.step()
        monitor.end_step()
        assert session_of(monitor).publisher.catch_up(20)
        rows = [row for record in records_of(session_of(monitor)) for row in rows_of(record)]

    found = {(row.step, row.entry.kind, row.entry.tensor): row.numbers["norm"] for row in rows}
    clipped = {key for key in expected if key[1] == "grad_clipped" and key[0] in clipped_steps}
    assert clipped == {key for key in found if key[1] == "grad_clipped"}
    for key, norm in expected.items():
        assert key not in found or norm == pytest.approx(found[key], rel=1e-5)
