"""Models with a monitor as an attribute, and the functions that copy and save them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Holding(nn.Module):
    """A model with a monitor, callback or sink as an attribute."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x)
        return result


def saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "pickle, an old protocol": lambda value: pickle.loads(pickle.dumps(value, 2)),
    "torch.save": saved,
    "a copy of a copy": lambda value: copy.deepcopy(pickle.loads(pickle.dumps(value))),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()


def train_elsewhere(model: Holding, results: Any) -> None:
    """Train a model in another process and put the results of its monitor methods into `results`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.held.attach(model, optimizer)
    step(model, optimizer)
    monitor = model.held
    results.put((monitor.is_copy, monitor.address, monitor.run, monitor.faults, model.body[0].weight.tolist()))
