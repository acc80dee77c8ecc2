"""Runs of one model with and without the monitor. Without it, the model records its own inputs and outputs."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tests.exporter.parts import Published, config_of, published
from torch import nn

from rankscope_exporter import Monitor
from rankscope_exporter.monitors.throughput import ThroughputConfig

NO_OPTIONS: dict[str, Any] = {}
KINDS = {"in": ("act_in", "act_grad_in"), "out": ("act_out", "act_grad_out")}


class Key(NamedTuple):
    kind: str
    module: str
    number: int | None = None
    micro_step: int | None = 0
    call: int | None = None


class Feature(NamedTuple):
    kind: str
    module: str
    index: int | None = None
    micro_step: int | None = None


class Notes:
    """References: the content of tensors when they are noted, and the gradients that `retain_grad` leaves on them."""

    def __init__(self) -> None:
        self.micro_step = 0
        self._values: dict[Key, torch.Tensor] = {}
        self._retained: dict[Key, torch.Tensor] = {}

    def __call__(
        self, side: str, module: str, tensor: torch.Tensor, number: int | None = None, call: int | None = None
    ) -> torch.Tensor:
        forward, backward = KINDS[side]
        if not tensor.is_floating_point():  # token ids and masks are not measured
            return tensor
        self._values[Key(forward, module, number, self.micro_step, call)] = tensor.detach().clone()
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor.retain_grad()
            self._retained[Key(backward, module, number, self.micro_step, call)] = tensor
        return tensor

    def tensors(self) -> dict[Key, torch.Tensor]:
        """Return the tensors and their gradients. A tensor without a gradient has no entry for it."""
        gradients = {key: tensor.grad for key, tensor in self._retained.items()}
        return {**self._values, **{key: gradient for key, gradient in gradients.items() if gradient is not None}}


def nothing(_side: str, _module: str, tensor: Any = None, *_: Any, **__: Any) -> Any:
    return tensor


@dataclass(frozen=True, slots=True)
class Run:
    """The results of a run: rows of tensors and features by step, and the final parameters and losses."""

    rows: dict[int, dict[Key, Mapping[str, Any]]]
    features: dict[int, dict[Feature, float]]
    notices: list[str]
    placements: set[str]
    faults: int
    state: dict[str, torch.Tensor]
    losses: list[float]

    def kinds_by_module(self) -> dict[str, set[tuple[str, int | None]]]:
        found: dict[str, set[tuple[str, int | None]]] = {}
        for key in (key for rows in self.rows.values() for key in rows):
            found.setdefault(key.module, set()).add((key.kind, key.number))
        return found


Loss = Callable[[nn.Module, int], torch.Tensor]


def measure(
    model: nn.Module,
    losses_of: Sequence[Loss] | Loss,
    quantities: Mapping[str, Mapping[str, Any]] | None,
    *,
    steps: int = 2,
    lr: float = 0.1,
) -> Run:
    """Train with one loss per micro-batch and the options by quantity, or without a monitor if they are None."""
    losses: list[float] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    config = config_of(
        *(quantities or ()),
        options=quantities or {},
        enabled=quantities is not None,
        statistics="torch",
        throughput=ThroughputConfig(method="off"),  # on a GPU, its absence would be one more notice
    )
    monitor = Monitor(config).attach(model, optimizer)
    for step in range(1, steps + 1):
        for loss_of in losses_of if isinstance(losses_of, Sequence) else (losses_of,):
            loss = loss_of(model, step)
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    found = Published(()) if quantities is None else published(monitor)
    monitor.detach()
    rows = rows_by_step(found)
    features: dict[int, dict[Feature, float]] = {}
    for row in found.of("features"):
        of_step = features.setdefault(row["step"], {})
        key = Feature(row["kind"], row["module"], row["index"], row["micro_step"])
        assert key not in of_step, "two rows of one name"
        of_step[key] = row["value"]
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    state = {name: local(value).detach().clone() for name, value in tensors}
    placements = {row.entry.placement for row in found.rows}
    return Run(rows, features, found.notices, placements, monitor.faults, state, losses)


def rows_by_step(found: Published) -> dict[int, dict[Key, Mapping[str, Any]]]:
    rows: dict[int, dict[Key, Mapping[str, Any]]] = {}
    for row in found.rows:
        key = Key(row.entry.kind, row.entry.tensor, row.entry.index, row.entry.micro_step, row.entry.call_seq)
        assert key not in rows.setdefault(row.step, {}), "two rows of one name"
        rows[row.step][key] = row.numbers
    return rows


def train(
    model: nn.Module,
    losses_of: Sequence[Loss] | Loss,
    steps: int,
    options: Mapping[str, Any] | None = NO_OPTIONS,
    *,
    lr: float = 0.1,
) -> Run:
    """Train with the quantity `activations` and these options, without a monitor if they are None."""
    return measure(model, losses_of, None if options is None else {"activations": options}, steps=steps, lr=lr)


def same(expected: Mapping[Key, torch.Tensor], rows: Mapping[Key, Mapping[str, Any]], rtol: float = 1e-5) -> None:
    """Assert that there is exactly one row for each tensor, with the tensor's statistics."""
    assert set(expected) == set(rows)
    for key, tensor in expected.items():
        wide = tensor.double()
        wanted = {"norm": wide.norm(), "min": wide.min(), "max": wide.max(), "mean": wide.mean()}
        for op, value in wanted.items():
            limit = rtol * max(abs(float(value)), float(wide.abs().max()))
            assert abs(float(value) - rows[key][op]) <= limit, (key, op, value, rows[key][op])
        counts = {"nans": 0, "infs": 0, "zeros": int((tensor == 0).sum()), "numel": tensor.numel()}
        assert counts == {op: rows[key][op] for op in counts}, key


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def equal_bits(one: Run, other: Run) -> bool:
    states = one.state.keys() == other.state.keys()
    return states and one.losses == other.losses and all(torch.equal(one.state[n], other.state[n]) for n in one.state)


class Composed(nn.Module):
    """A model of named modules, and a function of the model and its arguments that calls them."""

    def __init__(self, call: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.call = call
        for name, module in modules.items():
            self.add_module(name, module)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.reset_parameters()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self, *args, **kwargs)


def stack(*layers: nn.Module) -> nn.Sequential:
    """Return the layers in a sequence, always with equal numbers."""
    return nn.Sequential(*Composed(nothing, **{str(number): layer for number, layer in enumerate(layers)}).children())
