"""The reference: one small training in float64 without any wrapper, with the expected measurements."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS, ROWS = 3, 8
CLIP = 0.5  # every loop "clips" by this factor, which needs no norm over ranks
ADAM = {"lr": 0.01, "eps": 1e-3}  # a large eps: without it, the update is the sign of a rounding error


class Block(nn.Module):
    """A width that divides evenly, and one gain, too small to be divided."""

    def __init__(self, *, checkpointed: bool = False, reentrant: bool = False, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(6, hidden)
        self.down = nn.Linear(hidden, 6)
        self.gain = nn.Parameter(torch.ones(1))
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return x + self.gain * change


class Net(nn.Module):
    """Blocks between an input and an output layer. A stage of a pipeline leaves parts out, under the same names."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter: nn.Module | None = nn.Linear(5, 6)
        self.blocks = nn.ModuleDict({name: Block(**options) for name in "01"})
        self.leave: nn.Module | None = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x) if self.enter is not None else x
        for block in self.blocks.values():
            x = block(x)
        return self.leave(x) if self.leave is not None else x


def batch(rank: int, step: int, micro: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + micro))


def loss_of(output: torch.Tensor, _target: Any = None) -> torch.Tensor:
    return output.square().mean()


Gradients = dict[str, torch.Tensor]
Seen = dict[tuple[str, str], torch.Tensor]  # kind, module


@dataclass(slots=True)
class Truth:
    """The reference of one step: gradients of each rank and micro-batch, and the tensors that all ranks share."""

    micro: list[list[Gradients]]  # rank, micro-batch
    seen: list[list[Seen]]  # the same, of activations
    shared: dict[str, Gradients] = field(default_factory=dict)  # kind

    def local(self, rank: int) -> Gradients:
        """Return the sum over the micro-batches of one rank."""
        return {name: sum(one[name] for one in self.micro[rank]) for name in self.micro[rank][0]}  # type: ignore[misc]


def truths(
    ranks: Sequence[int],
    micros: int = 1,
    *,
    split: bool = False,
    skipped: Sequence[int] = (),
    clip: Callable[[Gradients], float] = lambda _reduced: CLIP,
    primed: bool = False,
    **options: Any,
) -> list[Truth]:
    """Return the truth of each step. `split`: one mean over micro-batches; `primed`: the optimizer stepped on zeros."""
    model = Net(**options).double()
    optimizer = torch.optim.Adam(model.parameters(), **ADAM)
    if primed:
        _update(model, optimizer, {name: torch.zeros_like(item) for name, item in model.named_parameters()})
    found = []
    for step in range(1, STEPS + 1):
        runs = [[_run(model, data) for data in batches(rank, step, micros, split=split)] for rank in ranks]
        truth = Truth(*([[one[part] for one in own] for own in runs] for part in (0, 1)))
        locals_ = [truth.local(place) for place in range(len(ranks))]
        divisor = len(ranks) * (micros if split else 1)
        reduced = {name: sum(one[name] for one in locals_) / divisor for name in locals_[0]}
        truth.shared = {"grad_reduced": reduced, "param_before": _parameters(model)}
        if step not in skipped:
            factor = clip(reduced)
            truth.shared["grad_clipped"] = {name: factor * gradient for name, gradient in reduced.items()}
            _update(model, optimizer, truth.shared["grad_clipped"])
        truth.shared["param_after"] = _parameters(model)
        for key in ("exp_avg", "exp_avg_sq"):
            truth.shared[key] = {name: optimizer.state[item][key].clone() for name, item in model.named_parameters()}
        found.append(truth)
    return found


def batches(rank: int, step: int, micros: int, *, split: bool) -> Sequence[torch.Tensor]:
    return batch(rank, step).chunk(micros) if split else [batch(rank, step, micro) for micro in range(micros)]


def _run(model: nn.Module, data: torch.Tensor) -> tuple[Gradients, Seen]:
    """Return the gradients of one micro-batch, and the activations of its outermost layers."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    seen: Seen = {}
    for name in OUTER:
        module = alone.get_submodule(name)
        module.register_forward_hook(lambda _, inputs, out, name=name: _keep(seen, name, inputs, out))
    loss_of(alone(data.double())).backward()
    gradients = {name: item.grad for name, item in alone.named_parameters() if item.grad is not None}
    for (kind, name), tensor in list(seen.items()):
        if tensor.grad is not None:
            seen[kind.replace("act_", "act_grad_"), name] = tensor.grad
    return gradients, seen


def entropies(truth: Truth, data: torch.Tensor, names: Sequence[str]) -> dict[str, float]:
    """Return the mean entropy of modules for a micro-batch, with the parameters at the beginning of a step."""
    model = Net().double()
    model.load_state_dict(truth.shared["param_before"])
    found: dict[str, float] = {}

    def keep(name: str, output: torch.Tensor) -> None:
        found[name] = float(torch.distributions.Categorical(logits=output.detach()).entropy().mean())

    for name in names:
        model.get_submodule(name).register_forward_hook(lambda _, __, output, name=name: keep(name, output))
    model(data.double())
    return found


OUTER = ("enter", "blocks.0", "blocks.1", "leave")


def _keep(seen: Seen, name: str, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    for kind, tensor in (("act_in", inputs[0]), ("act_out", output)):
        seen[kind, name] = tensor
        if tensor.requires_grad:
            tensor.retain_grad()


def _parameters(model: nn.Module) -> Gradients:
    return {name: item.detach().clone() for name, item in model.named_parameters()}


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Gradients) -> None:
    for name, item in model.named_parameters():
        item.grad = gradients[name].clone()
    optimizer.step()
