"""FLOPs of one training forward and its backward, counted on a meta copy by the formulas of torch's own flop counter.

`torch.utils.flop_counter.FlopCounterMode` itself would put hooks on all modules of the process while it counts, also
on those that train, so its formulas are used from a mode of our own. Attention counts whole, masked or not.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from rankscope_exporter.throughput.bare_copy import bare_copy
from rankscope_exporter.throughput.captured import Inputs
from rankscope_exporter.throughput.isolation import MOST_SECONDS, RefusedError, isolated, refuse_operation, unwatched

_TORCHS_OWN: Final = frozenset({"aten", "prim", "prims", "profiler"})


class NotCountedError(ValueError):
    """The model cannot be counted; the text says why."""


def count(
    model: nn.Module,
    inputs: Inputs,
    most_seconds: float = MOST_SECONDS,
    spent: Callable[[float], None] = lambda _cpu_seconds: None,
) -> float:
    """Return the FLOPs of a forward and backward of `model`, which is only read. Raises NotCountedError.

    Whatever is computed a second time for want of memory counts once. A model that checkpoints its activations
    unconditionally is counted forward alone, the backward taken for twice of it. `spent` is told what that has cost.
    """
    if _hooks_of_all_modules():
        raise NotCountedError("the process has hooks on all modules")
    reasons: list[str] = []
    for whole, training in ((True, True), (True, False), (False, True)):
        try:
            attempt = functools.partial(_isolated, model, inputs, most_seconds, whole=whole, training=training)
            return _alone(attempt, spent)
        except (Exception, RefusedError) as error:  # noqa: BLE001 - the user's own code, on tensors without numbers
            reasons.append(_sentence(error))
    raise NotCountedError(reasons[0])


def _alone(function: Callable[[], float], spent: Callable[[float], None]) -> float:
    """Return what `function` returns on a thread of its own: what a failure leaves of a mode goes with the thread."""
    with ThreadPoolExecutor(1, thread_name_prefix="rankscope-flops") as pool:
        try:
            return pool.submit(function).result()
        finally:
            spent(pool.submit(time.thread_time).result())


def _isolated(model: nn.Module, inputs: Inputs, most_seconds: float, *, whole: bool, training: bool) -> float:
    with isolated(model, most_seconds):
        return _counted(model, inputs, whole=whole, training=training)


def _counted(model: nn.Module, inputs: Inputs, *, whole: bool, training: bool) -> float:
    copied = bare_copy(model)
    if not training:
        copied.eval()  # where models leave out what is random, and what is computed a second time
    args, kwargs = inputs.made()
    counter = _Counter()
    with torch.set_grad_enabled(whole), counter:
        output = copied(*args, **kwargs)
        if not whole:
            return 3.0 * counter.flops
        ends = [tensor for tensor in _ends(output) if tensor.requires_grad]
        if not ends:
            raise NotCountedError("its outputs have no gradient")
        torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])
    return counter.flops


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Adds up what each operation costs; one that is no operation of torch's must have a formula."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.flops = 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        refuse_operation(func, args, kwargs)
        with unwatched():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        formula = flop_registry.get(func._overloadpacket)  # noqa: SLF001 - the key of torch's registry
        if formula is None:
            with self:
                simpler = func.decompose(*args, **kwargs)
            if simpler is not NotImplemented:
                return simpler
            if func.namespace not in _TORCHS_OWN:
                raise RefusedError(f"nobody says what {func} costs")
        out = func(*args, **kwargs)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        return out


def _ends(output: Any) -> Iterator[torch.Tensor]:
    """Yield where a backward begins: at a loss if the model has one, else at all that it returns."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        loss = output.get("loss")
        for item in output.values() if loss is None else (loss,):
            yield from _ends(item)
    elif isinstance(output, list | tuple):
        for item in output:
            yield from _ends(item)


def _hooks_of_all_modules() -> bool:
    module = nn.modules.module
    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    return any(getattr(module, name, None) for name in (*names, "_global_backward_pre_hooks"))


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    told = text if isinstance(error, ValueError | RefusedError) else f"{type(error).__name__}: {text}"
    return told if len(told) <= 200 else f"{told[:200]}…"
