"""What the script says about its model, compared with what is there: a wrong hint is named, and nothing hangs on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from rankscope_exporter.checks import whole
from rankscope_exporter.msprobe.arguments import Attachment, Construction

MOST_ITERATIONS: Final = 1 << 53

_CLASSES: Final = {
    "Megatron_DistributedOptimizer": "DistributedOptimizer",
    "Megatron_Float16OptimizerWithFloat16Params": "Float16OptimizerWithFloat16Params",
    "Megatron_ChainedDistributedOptimizer": "ChainedOptimizer",
    "Megatron_ChainedFloat16OptimizerWithFloat16Params": "ChainedOptimizer",
    "DeepSpeedZeroOptimizer_Stage0": "BF16_Optimizer",
    "DeepSpeedZeroOptimizer_Stage1_or_2": "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3": "DeepSpeedZeroOptimizer_Stage3",
}
"""Values of `opt_ty`, and the class that each stands for."""


def wrong_hints(said: Construction, given: Attachment) -> Iterator[str]:
    """Yield a sentence for each hint that does not fit, and for what of the model is left out."""
    yield from _of_main_grad(said.params_have_main_grad, given.chunks)
    yield from _of_optimizer(said.opt_ty, given.optimizer)
    if len(given.chunks) > 1 and not isinstance(given.watched, list):
        yield (
            f"the {len(given.chunks)} models are no chunks that Megatron-Core's DDP wraps, and the first is monitored: "
            "make a TrainerMon for each"
        )
    if (whole(given.grad_acc_steps) or 0) < 1:
        yield f"grad_acc_steps={given.grad_acc_steps!r} is no number of micro-batches; they are counted anyway"
    if not _is_iteration(whole(given.start_iteration)):
        yield f"start_iteration={given.start_iteration!r} is no number of a step, so steps count from 1"


def first_step(given: Attachment) -> int:
    """Return the number of the first step: one more than the tool's, which counts from 0."""
    started = whole(given.start_iteration)
    return 1 + started if started is not None and _is_iteration(started) else 1


def _of_main_grad(said: bool | None, models: Sequence[torch.nn.Module]) -> Iterator[str]:  # noqa: FBT001 - three values
    if said is None:
        return
    has = any(hasattr(parameter, "main_grad") for model in models for parameter in model.parameters())
    if said and not has:
        yield "params_have_main_grad=True, but no parameter has a main_grad: gradients are read from .grad"
    elif has and not said:
        yield "params_have_main_grad=False, but parameters have a main_grad: gradients are read where they are"


def _of_optimizer(said: Any, optimizer: Any) -> Iterator[str]:
    if said is None:
        return
    own = _class_names(optimizer)
    if said not in _CLASSES:
        yield f"opt_ty={said!r} is none of {', '.join(_CLASSES)}; it is not needed, the optimizer is a {own[0]}"
    elif _CLASSES[said] not in own:
        yield f"opt_ty={said!r}, but the optimizer is a {own[0]}, and is read as one"


def _class_names(optimizer: Any) -> list[str]:
    """Return the classes of an optimizer and of what it wraps, the outermost first."""
    names: list[str] = []
    while optimizer is not None and len(names) < len(_CLASSES):
        names.append(type(optimizer).__name__)
        optimizer = getattr(optimizer, "optimizer", None)
    return names


def _is_iteration(number: int | None) -> bool:
    return number is not None and 0 <= number <= MOST_ITERATIONS
