"""Restore the state of a model and of the random generators that a forward and backward pass changes."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

Undo = Callable[[], object]


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore random states, buffers, gradients and training modes at the end of the block, also after an error.

    At the begin of the block all gradients are None, so that a backward pass does not add to existing ones.
    """
    with contextlib.ExitStack() as undo:
        for keep in (_random_states, _modes, _buffers, _gradients):
            for step in keep(model):
                undo.callback(step)
        undo.callback(torch.clear_autocast_cache)  # it contains casts of weights with a freed graph
        yield


def _random_states(model: nn.Module) -> Iterator[Undo]:
    """Yield functions that restore the default generators of Python, numpy and torch, also of the devices in use."""
    python = random.getstate()
    yield lambda: random.setstate(python)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        state = numpy.get_state()
        yield lambda: numpy.set_state(state)
    on_cpu = torch.get_rng_state()
    yield lambda: torch.set_rng_state(on_cpu)
    for kind in _devices(model):
        yield _of_device(torch.get_device_module(kind))


def _of_device(module: object) -> Undo:
    for get, put in (("get_rng_state_all", "set_rng_state_all"), ("get_rng_state", "set_rng_state")):
        if hasattr(module, get):
            state = getattr(module, get)()
            return lambda: getattr(module, put)(state)
    return lambda: None


def _devices(model: nn.Module) -> set[str]:
    found = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped in torch
        found.add("cuda")
    return found - {"cpu", "meta"}


def _modes(model: nn.Module) -> Iterator[Undo]:
    modes = [(module, module.training) for module in model.modules()]

    def undo() -> None:
        for module, training in modes:
            if module.training != training:
                module.training = training

    yield undo


def _gradients(model: nn.Module) -> Iterator[Undo]:
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None

    def undo() -> None:
        for parameter, gradient in gradients:
            parameter.grad = gradient

    yield undo


def _buffers(model: nn.Module) -> Iterator[Undo]:
    tables = [(module, dict(module._buffers)) for module in model.modules()]  # noqa: SLF001 - includes None entries
    kept = [_Kept(buffer, buffer.detach().clone()) for buffer in model.buffers() if buffer.device.type != "meta"]

    def undo() -> None:
        for module, table in tables:
            now = module._buffers  # noqa: SLF001 - as above
            is_table = isinstance(now, dict)  # a scripted module has another table and replaces no tensors
            if is_table and (now.keys() != table.keys() or any(now[name] is not table[name] for name in table)):
                now.clear()
                now.update(table)
        with torch.no_grad():
            for buffer in kept:
                buffer.restore()

    yield undo


@dataclass(frozen=True, slots=True)
class _Kept:
    """A buffer and a copy of its values."""

    buffer: torch.Tensor
    values: torch.Tensor

    def restore(self) -> None:
        """Write the values back if the buffer has changed: an unchanged buffer may be read-only."""
        if self.buffer.shape != self.values.shape:
            self.buffer.data = self.values
        elif not _have_same_bits(self.buffer, self.values):
            self.buffer.copy_(self.values)


def _have_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.layout is not torch.strided:
        return False
    one, other = (tensor.detach().clone().reshape(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(one, other)
