"""With the default configuration, the forward pass of the user runs as often as without a monitor."""

from __future__ import annotations

import queue
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from rankscope_exporter import Monitor

STEPS = 4


class Balanced(nn.Module):
    """Appends a loss to a list outside of the model, as mixtures of experts do; the loop sums it up."""

    losses: list[torch.Tensor] = []  # noqa: RUF012 - shared by all, as a list of a module file is

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layer = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.losses.append(torch.softmax(self.gate(x), -1).mean(0).square().sum())
        return self.layer(x)


class Counting(nn.Module):
    """Computes a different result at each call."""

    calls = [0]  # noqa: RUF012 - as above

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return self.layer(x) * self.calls[0]


class Fed(nn.Module):
    """Removes a factor from a queue at each call."""

    factors: queue.SimpleQueue[float] = queue.SimpleQueue()

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factors.get_nowait()


class Tokens(nn.Module):
    """A token model that fits a formula, with an embedding table whose weight is computed from other parameters."""

    calls = [0]  # noqa: RUF012 - as above

    def __init__(self) -> None:
        super().__init__()
        self.table = parametrizations.spectral_norm(nn.Embedding(10, 4))
        self.head = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return self.head(self.table(x.abs().long() % 10)) * self.calls[0]


def reset() -> None:
    Balanced.losses.clear()
    Counting.calls[0] = Tokens.calls[0] = 0
    Fed.factors = queue.SimpleQueue()
    for number in range(STEPS):
        Fed.factors.put(1.0 + number)


def trained(
    model: nn.Module,
    batch: Callable[[], torch.Tensor],
    attach: Callable[[nn.Module, torch.optim.Optimizer], object],
    between: Callable[[int], object],
) -> list[Any]:
    """Return losses, state and the objects left outside of the model; `between` runs after each forward pass."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    attach(model, optimizer)
    losses = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        out = model(batch())
        between(step)
        loss = out.square().sum() + sum(Balanced.losses)
        losses.append((loss.item(), len(Balanced.losses)))
        Balanced.losses.clear()
        loss.backward()
        optimizer.step()
    outside = [Counting.calls[0], Tokens.calls[0], Fed.factors.qsize()]
    return [
        losses,
        [tensor.tolist() for tensor in model.state_dict().values()],
        outside,
        torch.get_rng_state().tolist(),
    ]


def floats() -> torch.Tensor:
    return torch.randn(3, 4)


def ids() -> torch.Tensor:
    return torch.randint(0, 10, (3, 4))


@pytest.mark.parametrize("anomaly_mode", [False, True], ids=["", "anomaly mode"])
@pytest.mark.parametrize(
    ("make", "batch"),
    [(Balanced, floats), (Counting, floats), (Fed, floats), (Tokens, ids)],
    ids=lambda value: value.__name__,
)
@pytest.mark.usual(2)
def test_forward_runs_as_often_as_without_a_monitor(make, batch, anomaly_mode, reader, eventually):
    def model_of() -> nn.Module:
        reset()
        torch.manual_seed(0)
        return make()

    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(anomaly_mode):
        warnings.simplefilter("always")
        alone = trained(model_of(), batch, lambda *_: None, lambda _: None)
        warned = len(caught)
        with Monitor({"console": False, "exit_wait_seconds": 0}) as monitor:

            def earlier_steps_are_published(step: int) -> None:
                eventually(lambda: len(reader(monitor).scalars("step_seconds")) >= step - 1)

            watched = trained(model_of(), batch, monitor.attach, earlier_steps_are_published)
            faults = monitor.faults

    assert alone == watched
    assert (0, 2 * warned) == (faults, len(caught))
