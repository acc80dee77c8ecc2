"""Counts the FLOPs of one forward and backward pass of a model, when the user calls `count_flops` before training.

The state of the model and of the random generators is restored afterwards. No other part of Rankscope runs code of the
user.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final, Self

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rankscope_exporter.adapters import Framework, framework_of, torch_private
from rankscope_exporter.adapters.parameter_names import plain_name
from rankscope_exporter.process.errors import CountError


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Context manager that restores the random states, and the buffers, gradients and training modes of `model`.

    They are restored at the end of the block, even after errors. At the start of the block all gradients are None, so
    that a backward pass does not add to existing ones.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(random.setstate, random.getstate())
        undo.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 - the state that models draw from
        for kind in _devices(model):
            devices = () if kind == "cpu" else range(torch.get_device_module(kind).device_count())
            undo.enter_context(torch.random.fork_rng(devices, device_type=kind))
        undo.callback(torch.clear_autocast_cache)  # it contains casts of weights with a freed graph
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
            table = torch_private.buffers_of(module)
            if isinstance(table, dict):  # a scripted module has another table and replaces no tensors
                undo.callback(table.update, dict(table))
                undo.callback(table.clear)  # before the update
        for buffer in model.buffers():
            if buffer.device.type != "meta":
                undo.callback(_restore, buffer, buffer.detach().clone())
        for parameter in model.parameters():
            undo.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        yield


def _devices(model: nn.Module) -> set[str]:
    """Return the types of devices of which the default random generators may be used."""
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped in torch
        kinds.add("cuda")
    return (kinds | {"cpu"}) - {"meta"}


@torch.no_grad()
def _restore(buffer: torch.Tensor, value: torch.Tensor) -> None:
    if buffer.shape != value.shape:
        buffer.data = value
    elif not _have_same_bits(buffer, value):  # an unchanged buffer may be read-only
        buffer.copy_(value)


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
    # Imported only here: torch's formulas take 0.2 s to import, and most programs do not count.
    operations = importlib.import_module("rankscope_exporter.monitors.flop_operations")
    dist = torch.distributed
    has_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    counter = operations.Counter()
    # Compiled code runs without compilation, so that each operation is dispatched and counted.
    eager = torch.compiler.set_stance("force_eager") if torch_private.is_compiler_loaded() else contextlib.nullcontext()
    with restored(model), eager, torch.inference_mode(mode=False), torch.enable_grad():
        if not model.training:
            model.train()
        own_args, own_kwargs = torch_private.tree_map(_copy, (args, kwargs))
        with counter, operations.Filter(alone=not has_others):
            ends = [tensor for tensor in _ends(model(*own_args, **own_kwargs)) if tensor.requires_grad]
            if not ends:
                raise CountError("no output of the model needs a gradient, so there is no backward pass to count")
            counter.in_backward = True
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    unknown = tuple(sorted(counter.unknown))
    if unknown:
        warnings.warn(
            f"rankscope.count_flops: no formula for {', '.join(unknown)}, so the FLOPs of these operations "
            "are not counted: register a formula with torch.utils.flop_counter.register_flop_formula",
            stacklevel=2,
        )
    shape, is_integer = _shape_of_input(args, kwargs)
    tokens = math.prod(shape) if is_integer and len(shape) in (1, 2) else None
    return FlopCount(counter.get_total_flops(), tokens, shape[0] if shape else None, unknown)


def _shape_of_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], bool]:
    """Return the shape of the argument `input_ids`, or else of the first tensor, and whether it has integers."""
    entries, _ = torch_private.tree_flatten_with_path((args, kwargs))
    tensors = [(path, item) for path, item in entries if isinstance(item, torch.Tensor) and not item.is_nested]
    ids = [entry for entry in tensors if getattr(entry[0][-1], "key", None) == "input_ids"]
    for _, tensor in (*ids, *tensors):
        is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool
        return tuple(tensor.shape), not is_number
    return (), False


def _check(model: Any) -> None:
    """Raise CountError if the FLOPs of the model cannot be counted, or if counting would change the training."""
    if not isinstance(model, nn.Module):
        raise CountError(f"count_flops takes a torch.nn.Module and its arguments, not a {type(model).__name__}")
    if type(torch.empty(0)) is not torch.Tensor:
        raise CountError(
            "a mode of torch such as FakeTensorMode is active: call count_flops() outside of this mode, with a model "
            "on the meta device"
        )
    if type(framework_of(model)) is not Framework or any(isinstance(module, _WRAPPERS) for module in model.modules()):
        raise CountError(
            "the model is wrapped or divided, so its forward pass communicates with other ranks: call count_flops() "
            "before the model is wrapped or divided, on one rank, and on the meta device if the model is too large"
        )
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    lazy = next((name for name, tensor in tensors if is_lazy(tensor)), None)
    if lazy is not None:
        raise CountError(f"{plain_name(lazy)} has no shape yet: run a forward pass before count_flops()")
    before_forward = [hook for module in model.modules() for hook in torch_private.forward_pre_hooks(module).values()]
    tables = ((name, torch_private.accumulated_hooks(parameter)) for name, parameter in model.named_parameters())
    after_gradient = [(name, hook) for name, hooks in tables if hooks is not None for hook in hooks.values()]
    if any(map(_is_ours, (*before_forward, *(hook for _, hook in after_gradient)))):
        raise CountError("the model is monitored, and its steps would be counted: call count_flops() before attach()")
    if after_gradient:
        raise CountError(
            f"{plain_name(after_gradient[0][0])} has a hook that runs when its gradient is complete, for example of an "
            "optimizer in the backward pass: call count_flops() before the hook is registered"
        )


def _is_ours(hook: Any) -> bool:
    own = __name__.partition(".")[0]
    return any(str(getattr(item, "__module__", "")).partition(".")[0] == own for item in (hook, type(hook)))


def _copy(value: Any) -> Any:
    """Return a copy of a tensor with its `requires_grad` and without its graph; any other value unchanged."""
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
        named: Mapping[str, Any] = output if isinstance(output, Mapping) else {}
        if is_dataclass(output):
            named = {field.name: getattr(output, field.name) for field in fields(output)}
        loss = named.get("loss")
        for item in named.values() if loss is None else (loss,):
            yield from _ends(item)
