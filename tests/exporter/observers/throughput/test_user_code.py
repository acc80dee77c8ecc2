"""With the default configuration, the forward pass of the user runs as often as without a monitor."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from rankscope_exporter import Monitor

STEPS = 4


class Tokens(nn.Module):
    """A token model that fits a formula, with a result that is different at each call.

    The weight of its table is computed from other parameters. Like a mixture of experts, it appends a loss to a list
    outside of the model, and the loop sums it up.
    """

    def __init__(self, losses: list[torch.Tensor]) -> None:
        super().__init__()
        self.table = parametrizations.spectral_norm(nn.Embedding(10, 4))
        self.head = nn.Linear(4, 10)
        self.calls, self.losses = 0, losses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = self.head(self.table(x)) * self.calls
        self.losses.append(torch.softmax(out, -1).mean(0).square().sum())
        return out


def trained(
    attach: Callable[[nn.Module, torch.optim.Optimizer], object], between: Callable[[int], object] = lambda _: None
) -> list[Any]:
    """Return losses, state, number of calls and random state; `between` runs after each forward pass."""
    torch.manual_seed(0)
    appended: list[torch.Tensor] = []
    model = Tokens(appended)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    attach(model, optimizer)
    losses = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        out = model(torch.randint(0, 10, (3, 4)))
        between(step)
        loss = out.square().sum() + sum(appended)
        losses.append((loss.item(), len(appended)))
        appended.clear()
        loss.backward()
        optimizer.step()
    state = [tensor.tolist() for tensor in model.state_dict().values()]
    return [losses, state, model.calls, torch.get_rng_state().tolist()]


@pytest.mark.parametrize("anomaly_mode", [False, True], ids=["", "anomaly mode"])
def test_forward_runs_as_often_as_without_a_monitor(anomaly_mode, reader, eventually):
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(anomaly_mode):
        warnings.simplefilter("always")
        alone = trained(lambda *_: None)
        warned = len(caught)
        with Monitor({"console": False, "exit_wait_seconds": 0}) as monitor:

            def earlier_steps_are_published(step: int) -> None:
                eventually(lambda: len(reader(monitor).scalars("step_seconds")) >= step - 1)

            watched = trained(monitor.attach, earlier_steps_are_published)
            faults = monitor.faults

    assert alone == watched
    assert (STEPS, 0, 2 * warned) == (watched[2], faults, len(caught))
