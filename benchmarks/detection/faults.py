"""The corpus: 66 faults of 25 kinds in up to three grades, each injected from one step on, and further cases.

A third of the faults is `held_out`: thresholds are never chosen with them. The cases check the number of messages, and
the names of slow ranks and phases.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn

RANK: Final = 1
"""The rank with the faults of one rank."""

TENSORS: Final = ("body.0.qkv.weight", "body.1.down.weight", "body.0.norm1.weight")
BLOCK: Final = "body.1."


@dataclass(kw_only=True)
class State:
    """The parts of a training that a fault can change; `step` counts from the step of the fault on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    rank: int
    step: int = -1
    step_seconds: float = 0.01
    clip: float | None = 0.25
    sleep: Callable[[float], None] = time.sleep
    kept: list[Any] = field(default_factory=list)

    def tensor(self, name: str) -> nn.Parameter:
        return dict(self.model.named_parameters())[name]

    def moments(self, name: str | None = None) -> Iterator[dict[str, torch.Tensor]]:
        for own, parameter in self.model.named_parameters():
            if name in (None, own):
                yield self.optimizer.state[parameter]


Change = Callable[[State], None]
Batch = Callable[[State, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault. `rank` and `tensor` (its beginning) are what a message should name; None where nothing is to be named.

    `once` is called before the forward pass of the step of the fault, `each` before that of each step from there on,
    and `forward` within it. `batch` changes the batch [sequences, context + 1], `labels` those of the loss. `gradient`
    gets state, name and local gradient of each parameter, and `update` is called within the update of the optimizer.
    Only rules about time can report a fault `of_time`, and only a fault `of_time` can explain their messages.
    """

    name: str
    rank: int | None = None
    tensor: str | None = None
    once: Change | None = None
    each: Change | None = None
    forward: Change | None = None
    batch: Batch | None = None
    labels: Batch | None = None
    gradient: Callable[[State, str, torch.Tensor], torch.Tensor] | None = None
    after_backward: Change | None = None
    update: Change | None = None
    has_scaler: bool = False
    of_time: bool = False
    phase: str | None = None  # that a message about a slow rank should name
    steps: int = 60  # that are observed from the step of the fault on
    messages: int = 1  # that should arrive
    is_slow: bool = False  # takes minutes
    held_out: bool = False


def _scaled(names: tuple[str, ...], factor: Callable[[int], float]) -> Callable[..., torch.Tensor]:
    def gradient(state: State, name: str, local: torch.Tensor) -> torch.Tensor:
        is_meant = state.rank == RANK and any(name.startswith(one) for one in names)
        return local * factor(state.step) if is_meant and state.step >= 0 else local

    return gradient


def _of_gradients() -> Iterator[Fault]:
    for value in (math.nan, math.inf):
        for name in TENSORS[:1]:
            yield Fault(name=f"{value} gradient", rank=RANK, tensor=name, gradient=_scaled((name,), _at_once(value)))
    for factor in (5.0, 50.0):
        for name in TENSORS:
            yield Fault(
                name=f"gradient x{factor:g} {name}", rank=RANK, tensor=name, gradient=_scaled((name,), _at_once(factor))
            )
    for percent in (0.3, 1.0, 3.0):
        growth = 1 + percent / 100
        yield Fault(
            name=f"gradient drifts {percent} %",
            rank=RANK,
            tensor=TENSORS[0],
            gradient=_scaled((TENSORS[0],), lambda step, growth=growth: growth**step),
        )
    for what, names in (("tensor", TENSORS[:1]), ("block", (BLOCK,)), ("all", ("",))):
        tensor = names[0] or None
        lost = _scaled(names, lambda _: 0.0)
        yield Fault(name=f"contribution lost, {what}", rank=RANK, tensor=tensor, gradient=lost)
    opposite = _scaled(("",), lambda _: -1.0)
    yield Fault(name="gradient of a rank has the wrong sign", rank=RANK, gradient=opposite)
    yield Fault(name="block not reduced", tensor=BLOCK, gradient=_keep, after_backward=_restore)


def _at_once(factor: float) -> Callable[[int], float]:
    return lambda step: factor if step == 0 else 1.0


def _keep(state: State, name: str, local: torch.Tensor) -> torch.Tensor:
    if name.startswith(BLOCK) and state.step >= 0:
        state.kept.append((name, local.clone()))
    return local


def _restore(state: State) -> None:
    for name, local in state.kept:
        state.tensor(name).grad.copy_(local)  # type: ignore[union-attr]
    state.kept.clear()


def _of_weights() -> Iterator[Fault]:
    name = "body.0.up.weight"
    yield Fault(name="nan weight", tensor=name, once=lambda s: s.tensor(name)[3, 3].fill_(math.nan))
    for percent in (10, 50, 100):
        yield Fault(name=f"dead units {percent} %", tensor=name, once=lambda s, p=percent: _kill(s.tensor(name), p))
    for bit in (10, 25, 30):
        yield Fault(name=f"bit {bit}", rank=RANK, tensor=name, once=lambda s, bit=bit: _flip(s, name, bit))
    for factor in (2.0, 3.0, 20.0):
        yield Fault(
            name=f"logits x{factor:g}", tensor="head.weight", once=lambda s, f=factor: s.tensor("head.weight").mul_(f)
        )
    for factor in (3.0, 10.0, 1000.0):
        yield Fault(
            name=f"embedding row x{factor:g}",
            tensor="embedding.weight",
            once=lambda s, f=factor: s.tensor("embedding.weight")[101].mul_(f),
        )
    for percent in (1, 5):
        yield Fault(
            name=f"logits grow {percent} %",
            tensor="head.weight",
            update=lambda s, p=percent: s.tensor("head.weight").mul_(1 + p / 100),
        )
    yield Fault(
        name="embedding row grows 10 %",
        tensor="embedding.weight",
        update=lambda s: s.tensor("embedding.weight")[101].mul_(1.1),
    )
    yield Fault(
        name="norm fades", tensor="body.1.norm2.weight", update=lambda s: s.tensor("body.1.norm2.weight").mul_(0.9)
    )


def _kill(weight: torch.Tensor, percent: int) -> None:
    weight[: len(weight) * percent // 100] = 0


def _flip(state: State, name: str, bit: int) -> None:
    if state.rank == RANK:
        elements = state.tensor(name).data.flatten()  # shares the memory of the tensor
        usual = elements.abs().kthvalue(len(elements) // 2).indices
        elements.view(torch.int32)[usual] ^= 1 << bit


def _of_optimizer() -> Iterator[Fault]:
    name = TENSORS[0]
    for what, key, factor in (("m", "exp_avg", 3.0), ("sign of m", "exp_avg", -1.0), ("v", "exp_avg_sq", 10.0)):
        yield Fault(
            name=f"corrupted {what}", rank=RANK, tensor=name, once=lambda s, k=key, f=factor: _moments(s, name, (k,), f)
        )
    yield Fault(
        name="v zeroed on a rank", rank=RANK, tensor=name, once=lambda s: _moments(s, name, ("exp_avg_sq",), 0.0)
    )
    for keys in (("exp_avg",), ("exp_avg_sq",), ("exp_avg", "exp_avg_sq")):
        yield Fault(name=f"resume without {' and '.join(keys)}", once=lambda s, k=keys: _moments(s, None, k, 0.0))
    yield Fault(name="no clipping", once=lambda s: setattr(s, "clip", None))
    for factor in (10.0, 100.0):
        yield Fault(name=f"decay x{factor:g}", once=lambda s, f=factor: _group(s, "weight_decay", f))
    for factor in (3.0, 20.0, 100.0):
        yield Fault(name=f"learning rate x{factor:g}", each=lambda s, f=factor: _group(s, "lr", f))
    yield Fault(
        name="scale collapses", has_scaler=True, gradient=lambda s, _, g: g * (math.inf if s.step >= 0 else 1.0)
    )


def _moments(state: State, name: str | None, keys: tuple[str, ...], factor: float) -> None:
    if name is None or state.rank == RANK:
        for moments in state.moments(name):
            for key in keys:
                moments[key].mul_(factor)


def _group(state: State, key: str, factor: float) -> None:
    for group in state.optimizer.param_groups:
        group[key] *= factor


def _of_data() -> Iterator[Fault]:
    def random(state: State, batch: torch.Tensor, rows: int = 8) -> torch.Tensor:
        if state.rank == RANK:
            batch = batch.clone()
            batch[:rows] = torch.randint(0, 256, batch[:rows].shape)
        return batch

    def repeated(state: State, batch: torch.Tensor) -> torch.Tensor:
        state.kept = state.kept or [batch]
        return state.kept[0]

    def tiny(state: State, batch: torch.Tensor) -> torch.Tensor:
        state.kept = [*state.kept, batch][:4]
        return state.kept[state.step % 4]

    def shuffled(_: State, labels: torch.Tensor) -> torch.Tensor:
        return labels.flatten()[torch.randperm(labels.numel())].view(labels.shape)

    def of_rank(change: Batch) -> Batch:
        return lambda state, batch: change(state, batch) if state.rank == RANK else batch

    yield Fault(name="tiny set", batch=tiny)
    yield Fault(name="random batch", rank=RANK, batch=random)
    yield Fault(name="random sequence", rank=RANK, batch=lambda s, batch: random(s, batch, 1))
    yield Fault(name="repeated batch, one rank", rank=RANK, batch=of_rank(repeated))
    yield Fault(name="repeated batch", batch=repeated)
    yield Fault(name="shuffled labels, one rank", rank=RANK, labels=of_rank(shuffled))
    yield Fault(name="shuffled labels", labels=shuffled)


def _of_time() -> Iterator[Fault]:
    for percent in (20, 50, 100):
        yield Fault(
            name=f"slow rank {percent} %",
            rank=RANK,
            of_time=True,
            phase="forward",
            forward=lambda s, p=percent: _sleep(s, p, s.rank == RANK),
        )
    for percent in (10, 50, 100):
        yield Fault(
            name=f"data wait {percent} %", of_time=True, batch=lambda s, batch, p=percent: _slow_batch(s, batch, p)
        )
    for percent in (0.1, 0.3):
        yield Fault(
            name=f"steps slow down {percent} %", of_time=True, forward=lambda s, p=percent: _sleep(s, p * s.step)
        )
    for size in (50_000, 500_000):
        yield Fault(name=f"leak of {size // 1000} kB", each=lambda s, n=size: s.kept.append(b"x" * n))
    hang, rank = Fault(name="hang of all", of_time=True, is_slow=True, once=lambda s: s.sleep(400)), RANK
    yield replace(hang, name="hang of a rank", rank=rank, once=lambda s: s.sleep(400) if s.rank == rank else None)
    yield hang


def _sleep(state: State, percent: float, is_meant: bool = True, least: float = 0.0) -> None:  # noqa: FBT001, FBT002
    if is_meant:
        state.sleep(max(least, percent / 100 * state.step_seconds))


def _slow_batch(state: State, batch: torch.Tensor, percent: float) -> torch.Tensor:
    _sleep(state, percent)
    return batch


def corpus() -> list[Fault]:
    """Return the faults in a fixed order; every third one is held out."""
    found = [*_of_gradients(), *_of_weights(), *_of_optimizer(), *_of_data(), *_of_time()]
    return [replace(one, held_out=place % 3 == 2) for place, one in enumerate(found)]


def message_cases() -> list[Fault]:
    """Return a fault that reaches another tensor at each of 40 steps, and 33 gradients that are 50 times too large."""

    def spikes(name: str, every: int, count: int, messages: int) -> Fault:
        def gradient(state: State, tensor: str, local: torch.Tensor) -> torch.Tensor:
            number, rest = divmod(state.step, every)
            names = [own for own, _ in state.model.named_parameters()]
            is_meant = state.rank == RANK and 0 <= number < count and rest == 0
            return local * 50.0 if is_meant and tensor == names[number % len(names)] else local

        return Fault(name=name, rank=RANK, gradient=gradient, steps=every * count + 20, messages=messages)

    return [spikes("spikes that move", 1, 40, 1), spikes("single spikes", 25, 33, 33)]


MOST_SLOWDOWNS: Final = 120
LEAST_SLOWDOWN: Final = 0.05
"""Seconds of a slowdown of at least the median time of a step."""


def slowdown(number: int) -> Fault:
    """Return a slowdown of one rank: in computation, in input, or by pauses. Each sixth is of 20 to 50 % of a step."""
    draw = random.Random(number)  # noqa: S311 - not for cryptography
    is_mild, what = number % 6 == 5, draw.choice(("forward", "backward", "input", "pauses"))
    percent, rank = draw.uniform(20, 50) if is_mild else draw.uniform(100, 300), draw.randrange(2)
    least = 0.0 if is_mild else LEAST_SLOWDOWN

    def slow(state: State, times: float = 1.0) -> None:
        _sleep(state, percent * times, state.rank == rank, least * times)

    def of_head(state: State, name: str, local: torch.Tensor) -> torch.Tensor:
        if name == "head.weight" and state.step >= 0:
            slow(state)
        return local

    phase = what if what in ("forward", "backward") else "data_wait"
    own = Fault(name=f"slowdown {number}: {what} {percent:.0f} %", rank=rank, phase=phase, of_time=True, steps=160)
    match what:
        case "forward":
            return replace(own, forward=slow)
        case "backward":
            return replace(own, gradient=of_head)
        case "input":
            return replace(own, batch=lambda state, batch: (slow(state), batch)[1])
        case _:
            return replace(own, each=lambda state: slow(state, 4.0) if state.step % 4 == 0 else None)


def every_fault() -> dict[str, Fault]:
    """Return the faults and all cases by name."""
    return {one.name: one for one in (*corpus(), *message_cases(), *map(slowdown, range(MOST_SLOWDOWNS)))}
