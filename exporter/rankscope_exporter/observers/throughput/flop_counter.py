"""Counts the FLOPs of one forward and backward pass of a model, when the user calls `count_flops` before training.

The state of the model and of the random generators is restored afterwards. No other part of Rankscope runs code of the
user: TFLOP/s and MFU use a number from the settings, or a formula.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, Self

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from rankscope_exporter.adapters import framework_of
from rankscope_exporter.adapters.ddp import Plain
from rankscope_exporter.base.errors import CountError
from rankscope_exporter.model.parameter_names import plain_name
from rankscope_exporter.observers.throughput.costs import Inputs

Undo = Callable[[], object]


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Context manager that restores the random states, and the buffers, gradients and training modes of `model`.

    They are restored at the end of the block, even after errors. At the start of the block all gradients are None, so
    that a backward pass does not add to existing ones.
    """
    with contextlib.ExitStack() as undo:
        for keep in (_random_states, _modes, _buffers, _gradients):
            for step in keep(model):
                undo.callback(step)
        undo.callback(torch.clear_autocast_cache)  # it contains casts of weights with a freed graph
        yield


def _random_states(model: nn.Module) -> Iterator[Undo]:
    """Yield functions that restore the default random generators of Python, numpy and torch (CPU and used devices)."""
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
    """A buffer of a model and a copy of the values that the buffer had before the FLOPs were counted."""

    buffer: torch.Tensor
    values: torch.Tensor

    def restore(self) -> None:
        """Restore the values of the buffer if they have changed.

        An unchanged buffer is not written, because it may be read-only.
        """
        if self.buffer.shape != self.values.shape:
            self.buffer.data = self.values
        elif not _have_same_bits(self.buffer, self.values):
            self.buffer.copy_(self.values)


def _have_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.layout is not torch.strided:
        return False
    one, other = (tensor.detach().clone().reshape(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(one, other)


_WRAPPERS: Final = (nn.DataParallel, nn.parallel.DistributedDataParallel)


class FlopCount(float):
    """Number of FLOPs of one forward pass and its backward pass, as a float.

    Its attributes are the numbers of tokens and samples of the pass, and the names of operations without a formula.
    """

    tokens: int | None
    """Number of token ids in the arguments of the model; None if there are no token ids."""
    samples: int | None
    """Batch size of the arguments of the model; None if there is no tensor."""
    unknown: tuple[str, ...]
    """Names of operations that ran and are not in the count, because no formula for them is registered."""

    def __new__(
        cls, flops: float, tokens: int | None = None, samples: int | None = None, unknown: tuple[str, ...] = ()
    ) -> Self:
        """Return the number of FLOPs as a float with the attributes `tokens`, `samples` and `unknown`."""
        made = super().__new__(cls, flops)
        made.tokens, made.samples, made.unknown = tokens, samples, unknown
        return made

    def per_token(self, tokens: int | None = None) -> float:
        """Return the FLOPs per token, for the setting `throughput.flops_per_token`.

        `tokens` is by default the number of token ids in the arguments. Raises CountError if `tokens` is not given and
        the number of token ids is unknown.
        """
        return self._per("tokens", self.tokens if tokens is None else tokens)

    def per_sample(self, samples: int | None = None) -> float:
        """Return the FLOPs per sample, for the setting `throughput.flops_per_sample`.

        `samples` is by default the batch size of the arguments. Raises CountError if `samples` is not given and the
        batch size is unknown.
        """
        return self._per("samples", self.samples if samples is None else samples)

    def _per(self, name: str, amount: int | None) -> float:
        if amount is None or amount < 1:
            raise CountError(
                f"the number of {name} must be a whole number of at least 1, not {amount!r}: pass the number "
                "to per_token() or per_sample()"
            )
        return float(self) / amount


def count_flops(model: nn.Module, /, *args: Any, **kwargs: Any) -> FlopCount:
    """Run `model(*args, **kwargs)` and its backward pass once, and return their FLOPs.

    Call it before `Monitor.attach()` and before the model is wrapped (DDP, FSDP, …), with a batch as in training:

        counted = rankscope.count_flops(model, input_ids, labels=labels)
        monitor = rankscope.Monitor({"throughput": {"flops_per_token": counted.per_token()}})

    The result is a float; `per_token()` and `per_sample()` divide it for `flops_per_token` and `flops_per_sample`.
    The count uses the formulas of `torch.utils.flop_counter`; a multiplication with its addition counts as two FLOPs.
    Frozen parameters need no gradients and count less. Recomputed activations do not count. An operation without a
    formula, such as a custom kernel, is named in a warning and in the attribute `unknown` of the result. A kernel that
    torch does not dispatch is not counted. torch's `register_flop_formula` adds a formula.

    The backward pass begins at `loss` if the output has one, otherwise at all outputs that need a gradient. A loss that
    multiplies matrices outside of the model is not counted: pass a module that computes it. A model on the meta device,
    with inputs on that device, is counted without memory and without computation.

    The model runs in training mode, without compilation, on copies of the tensors in the arguments. Afterwards, also
    after an error, the function restores the random states of Python, numpy and torch (all devices in use), the buffers
    and their values, the gradients of the parameters, and the training mode of every module.

    The function does not restore Python objects and files that the forward pass changes outside of the model's buffers,
    plain attributes of modules, parameters that the forward pass itself changes, generators other than the default
    ones, and effects of registered hooks.

    Raises CountError for a model that is wrapped, divided or monitored, or communicates with other ranks. The same
    error is raised for lazy parameters, for hooks that update the model in the backward pass, and if no output needs a
    gradient. Errors of the model are not caught.
    """
    _check(model)
    counter = _counter()
    with restored(model), _without_compilation(), torch.inference_mode(mode=False), torch.enable_grad():
        if not model.training:
            model.train()
        own_args, own_kwargs = pytree.tree_map(_copy, (args, kwargs))
        with counter:
            ends = [tensor for tensor in _ends(model(*own_args, **own_kwargs)) if tensor.requires_grad]
            if not ends:
                raise CountError("no output of the model needs a gradient, so there is no backward pass to count")
            counter.in_backward = True
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    if counter.unknown:
        warnings.warn(
            f"rankscope.count_flops: no formula for {', '.join(counter.unknown)}, so the FLOPs of these operations "
            "are not counted: register a formula with torch.utils.flop_counter.register_flop_formula",
            stacklevel=2,
        )
    inputs = Inputs.of(args, kwargs)
    return FlopCount(counter.flops, inputs.tokens, inputs.samples, counter.unknown)


def _check(model: Any) -> None:
    """Raise CountError if the FLOPs of the model cannot be counted, or if counting would change the training."""
    if not isinstance(model, nn.Module):
        raise CountError(f"count_flops takes a torch.nn.Module and its arguments, not a {type(model).__name__}")
    if type(torch.empty(0)) is not torch.Tensor:
        raise CountError(
            "a mode of torch such as FakeTensorMode is active: call count_flops() outside of this mode, with a model "
            "on the meta device"
        )
    if not isinstance(framework_of(model), Plain) or any(isinstance(module, _WRAPPERS) for module in model.modules()):
        raise CountError(
            "the model is wrapped or divided, so its forward pass communicates with other ranks: call count_flops() "
            "before the model is wrapped or divided, on one rank, and on the meta device if the model is too large"
        )
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    lazy = next((name for name, tensor in tensors if is_lazy(tensor)), None)
    if lazy is not None:
        raise CountError(f"{plain_name(lazy)} has no shape yet: run a forward pass before count_flops()")
    after_gradient = {name: _hooks_after_gradient(parameter) for name, parameter in model.named_parameters()}
    before_forward = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]  # noqa: SLF001 - torch has no list of hooks
    if any(_is_ours(hook) for hooks in (before_forward, *after_gradient.values()) for hook in hooks):
        raise CountError("the model is monitored, and its steps would be counted: call count_flops() before attach()")
    hooked = next((name for name, hooks in after_gradient.items() if hooks), None)
    if hooked is not None:
        raise CountError(
            f"{plain_name(hooked)} has a hook that runs when its gradient is complete, for example of an optimizer in "
            "the backward pass: call count_flops() before the hook is registered"
        )


def _hooks_after_gradient(parameter: nn.Parameter) -> list[Any]:
    hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001 - as above
    return [] if hooks is None else list(hooks.values())


def _is_ours(hook: Any) -> bool:
    own = __name__.partition(".")[0]
    return any(str(getattr(item, "__module__", "")).partition(".")[0] == own for item in (hook, type(hook)))


def _counter() -> Any:
    # Imported only here: torch's formulas take 0.2 s to import, and most programs do not count.
    operations = importlib.import_module("rankscope_exporter.observers.throughput.operations")
    dist = torch.distributed
    in_group = dist.is_available() and dist.is_initialized()
    return operations.OperationCounter(alone=not in_group or dist.get_world_size() == 1)


@contextlib.contextmanager
def _without_compilation() -> Iterator[None]:
    """Context manager in which compiled code runs without compilation.

    Each operation is then dispatched and counted.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes seconds
        yield
    else:
        with torch.compiler.set_stance("force_eager"):
            yield


def _copy(value: Any) -> Any:
    """Return a copy of a tensor, without its autograd graph and with the same `requires_grad`.

    Other values are returned unchanged.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _ends(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a model's `output` at which the backward pass begins.

    They are the tensors in the entry `loss` of the output if it exists, otherwise all tensors in the output.
    """
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, list | tuple):
        for item in output:
            yield from _ends(item)
    else:
        named = _named(output)
        loss = named.get("loss")
        for item in named.values() if loss is None else (loss,):
            yield from _ends(item)


def _named(output: Any) -> Mapping[str, Any]:
    if isinstance(output, Mapping):
        return output
    if is_dataclass(output):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    return {}
