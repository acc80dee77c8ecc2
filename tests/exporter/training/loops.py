"""Trainings that keep the tensors and numbers which the monitor should record, and compare them with its records."""

from typing import Any

import pytest
import torch
from tests.exporter.parts import Watched
from torch import nn

from rankscope_exporter.monitors.throughput import ThroughputConfig

STEPS = 4


PLAIN = ("parameters", "gradients", "optimizer_state")


Key = tuple[int, str, str]


class Loop(Watched):
    def __init__(self, *more: str, net: nn.Module | None = None, explicit: bool = False, every: int = 1) -> None:
        torch.manual_seed(0)
        self.net = net or nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.right: dict[Key, torch.Tensor | None] = {}
        self.losses: dict[int, float] = {}
        self.settings: dict[str, Any] = {
            "quantities": (*PLAIN, *more),
            "every": every,
            "steps": "explicit" if explicit else "auto",
            "throughput": ThroughputConfig(method="off"),  # on a GPU, its absence would be one more notice
        }

    def adam(self, *modules: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for module in modules or (self.net,) for p in module.parameters()], lr=0.01)

    def attach(self, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__(self.net, optimizers, **self.settings)

    def note(self, step: int, kind: str, tensors: dict[str, torch.Tensor | None] | None = None) -> None:
        """Keep the tensors of the model that `kind` names, or `tensors`."""
        for name, parameter in self.net.named_parameters():
            own = parameter.grad if kind.startswith("grad") else parameter
            if tensors is None and own is not None:
                self.right[step, kind, name] = own.detach().clone()
        for name, tensor in (tensors or {}).items():
            self.right[step, kind, name] = None if tensor is None else tensor.detach().clone()

    def note_state(self, step: int, kind: str, optimizer: torch.optim.Optimizer, key: str | None = None) -> None:
        self.note(step, kind, {n: optimizer.state[p][key or kind] for n, p in self.net.named_parameters()})

    def backward(self) -> float:
        loss = self.net(torch.randn(3, 4)).square().sum()
        loss.backward()
        return loss.item()

    def step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        self.losses[step] = self.backward()
        self.note(step, "grad_reduced")
        optimizer.step()
        self.note(step, "param_after")
        self.monitor.log(loss=self.losses[step])

    def end(self, steps: int | None = STEPS) -> None:
        """End the training, and compare its records with the tensors of the loop and the number of its steps."""
        self.finish()
        rows = self.rows()
        self.indices = {(row.step, row.entry.kind, row.entry.micro_step) for row in rows}
        numbers = {(row.step, row.entry.kind, row.entry.tensor): row.numbers for row in rows}
        assert self.losses == pytest.approx(dict(self.scalars("loss")), rel=1e-5)
        for key, tensor in self.right.items():
            if tensor is None:
                assert key not in numbers
            else:
                found = numbers[key]["norm"], numbers[key]["numel"]
                assert pytest.approx((float(tensor.double().norm()), tensor.numel()), rel=1e-5, abs=1e-6) == found, key
        if steps is not None:
            assert list(range(1, steps + 1)) == list(dict.fromkeys(r.step for r in self.records if r.step is not None))


def attached(*more: str, **options: Any) -> tuple[Loop, torch.optim.Optimizer]:
    loop = Loop(*more, **options)
    optimizer = loop.adam()
    loop.attach(optimizer)
    return loop, optimizer


def detached(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in net.named_parameters()}
