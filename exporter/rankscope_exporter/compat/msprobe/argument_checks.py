"""Parses the arguments of `TrainerMon` and `set_monitor`, and compares hints of the script with the model.

For `set_monitor`, msprobe's manual prints the arguments in the order `(model, grad_acc_steps, optimizer, dp_group,
tp_group, start_iteration)`. msprobe's code accepts the order `(model, optimizer, grad_acc_steps, tp_group, dp_group,
start_iteration)`. The constructor of msprobe's `TrainerMon` has had two orders. This module finds the order in a call
by the types of the arguments. Hints such as `opt_ty` are only compared with the model and the optimizer: wrong hints
are reported, and no result depends on a hint.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from rankscope_exporter.adapters import are_chunks
from rankscope_exporter.base.errors import ConfigError

AS_IN_THE_MANUAL: Final = ("grad_acc_steps", "optimizer", "dp_group", "tp_group", "start_iteration")
AS_IN_THE_CODE: Final = ("optimizer", "grad_acc_steps", "tp_group", "dp_group", "start_iteration")
_CONSTRUCTION_NAMES: Final = ("process_group", "params_have_main_grad", "opt_ty")
_MISPRINTED: Final = {"param_have_main_grad": "params_have_main_grad"}
"""Misspelled names of arguments, with the correct names. msprobe's manual contains both spellings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Construction:
    """The arguments of `TrainerMon` that follow the configuration file. An argument that the script omits is None."""

    process_group: Any = None
    params_have_main_grad: bool | None = None
    opt_ty: str | None = None

    @classmethod
    def of(cls, positional: Sequence[Any], named: Mapping[str, Any]) -> Construction:
        """Parse the arguments of `TrainerMon` and return them by name. Raises ConfigError if an argument is invalid."""
        given = {_MISPRINTED.get(name, name): value for name, value in named.items()}
        places = list(_CONSTRUCTION_NAMES)
        for value in positional:
            place = _place_of(value, places)
            # Older releases had no group, so a flag or a name may come first: its type decides which argument it is.
            _put(given, place, value, "TrainerMon")
            del places[: places.index(place) + 1]
        _check_names(given, _CONSTRUCTION_NAMES, "TrainerMon")
        made = cls(**given)
        group = made.process_group
        if group is not None and not callable(getattr(group, "rank", None)):
            raise ConfigError(f"process_group must be the process group of the pipeline or None, not {group!r}")
        if not isinstance(made.params_have_main_grad, bool | None):
            raise ConfigError(f"params_have_main_grad must be True or False, not {made.params_have_main_grad!r}")
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """The arguments of `TrainerMon.set_monitor`, by name."""

    model: Any
    optimizer: Any = None
    grad_acc_steps: Any = 1
    dp_group: Any = None
    tp_group: Any = None
    start_iteration: Any = 0

    @classmethod
    def of(cls, call: str, positional: Sequence[Any], named: Mapping[str, Any]) -> Attachment:
        """Parse the arguments of the function `call` and return them by name.

        The positional arguments may be in the order of msprobe's manual or of msprobe's code. Raises ConfigError if an
        argument is invalid.
        """
        given = dict(named)
        names: tuple[str, ...] = ("model",)
        if len(positional) > 1:
            is_count = isinstance(positional[1], float) or _whole(positional[1]) is not None
            names += AS_IN_THE_MANUAL if is_count else AS_IN_THE_CODE
        if len(positional) > len(names):
            raise ConfigError(
                f"{call} takes {len(names)} arguments by position, not {len(positional)}: pass them by name"
            )
        for name, value in zip(names, positional, strict=False):
            _put(given, name, value, call)
        _check_names(given, ("model", *AS_IN_THE_CODE), call)
        if "model" not in given:
            raise ConfigError(f"{call} needs the model: call {call}(model, optimizer=optimizer)")
        return cls(**given)

    @property
    def chunks(self) -> Sequence[Any]:
        """Return the model chunks as a sequence.

        It has one element unless the pipeline has virtual stages on this rank.
        """
        return self.model if isinstance(self.model, list | tuple) else [self.model]

    @property
    def watched(self) -> torch.nn.Module | list[torch.nn.Module]:
        """Return the modules to monitor: all model chunks if Megatron-Core's DDP wraps them, else the first chunk."""
        return list(self.chunks) if len(self.chunks) > 1 and are_chunks(self.chunks) else self.chunks[0]

    def check(self, call: str) -> None:
        """Raise ConfigError if the model or the optimizer has a wrong type."""
        if isinstance(self.optimizer, torch.nn.Module) and not isinstance(self.model, torch.nn.Module):
            raise ConfigError(f"{call}: model and optimizer are exchanged; pass the model first")
        if not self.chunks or not all(isinstance(module, torch.nn.Module) for module in self.chunks):
            raise ConfigError(f"{call}: model must be a torch module or a list of its chunks, not {_type(self.model)}")
        if self.optimizer is None:
            raise ConfigError(f"{call} needs the optimizer: call {call}(model, optimizer=optimizer)")
        optimizers = self.optimizer if isinstance(self.optimizer, list | tuple) else [self.optimizer]
        if not optimizers or not all(callable(getattr(item, "step", None)) for item in optimizers):
            raise ConfigError(f"{call}: optimizer must be a torch optimizer or wrap one, not {_type(self.optimizer)}")


def _place_of(value: Any, places: Sequence[str]) -> str:
    wanted = "params_have_main_grad" if isinstance(value, bool) else "opt_ty" if isinstance(value, str) else None
    if wanted is not None and wanted in places:
        return wanted
    if not places:
        raise ConfigError(
            "too many arguments: TrainerMon takes config_file_path, process_group, params_have_main_grad and opt_ty"
        )
    return places[0]


def _put(given: dict[str, Any], name: str, value: Any, call: str) -> None:
    if name in given:
        raise ConfigError(f"{call}: {name} is given by position and by name; give it once")
    given[name] = value


def _check_names(given: Mapping[str, Any], known: Sequence[str], call: str) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(f"{call} has no argument {unknown[0]!r}; its arguments are {', '.join(known)}")


def _type(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a list of {', '.join(sorted({type(item).__name__ for item in value})) or 'nothing'}"
    return f"a {type(value).__name__}"


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
"""Names of optimizer classes by the value of the argument `opt_ty` in msprobe."""


def wrong_hints(hints: Construction, given: Attachment) -> Iterator[str]:
    """Yield a sentence for each wrong hint about the model or the optimizer, and one for unmonitored model chunks."""
    yield from _main_grad_hints(hints.params_have_main_grad, given.chunks)
    yield from _optimizer_hints(hints.opt_ty, given.optimizer)
    if len(given.chunks) > 1 and not isinstance(given.watched, list):
        yield (
            f"the {len(given.chunks)} models are no chunks that Megatron-Core's DDP wraps, and the first is monitored: "
            "make a TrainerMon for each"
        )
    if (_whole(given.grad_acc_steps) or 0) < 1:
        yield f"grad_acc_steps={given.grad_acc_steps!r} is no number of micro-batches; they are counted anyway"
    if not _is_iteration(_whole(given.start_iteration)):
        yield f"start_iteration={given.start_iteration!r} is no number of a step, so steps count from 1"


def first_step(given: Attachment) -> int:
    """Return the number of the first step in Rankscope.

    It is one more than in msprobe, because msprobe counts from 0.
    """
    started = _whole(given.start_iteration)
    return 1 + started if started is not None and _is_iteration(started) else 1


def _main_grad_hints(hint: bool | None, models: Sequence[torch.nn.Module]) -> Iterator[str]:  # noqa: FBT001 - three values
    if hint is None:
        return
    has = any(hasattr(parameter, "main_grad") for model in models for parameter in model.parameters())
    if hint and not has:
        yield "params_have_main_grad=True, but no parameter has a main_grad: gradients are read from .grad"
    elif has and not hint:
        yield "params_have_main_grad=False, but parameters have a main_grad: gradients are read where they are"


def _optimizer_hints(hint: Any, optimizer: Any) -> Iterator[str]:
    if hint is None:
        return
    own = _class_names(optimizer)
    if hint not in _CLASSES:
        yield f"opt_ty={hint!r} is none of {', '.join(_CLASSES)}; it is not needed, the optimizer is a {own[0]}"
    elif _CLASSES[hint] not in own:
        yield f"opt_ty={hint!r}, but the optimizer is a {own[0]}, and is read as one"


def _class_names(optimizer: Any) -> list[str]:
    """Return the class names of an optimizer and of the optimizers that it wraps, from the outermost inwards."""
    names: list[str] = []
    while optimizer is not None and len(names) < len(_CLASSES):
        names.append(type(optimizer).__name__)
        optimizer = getattr(optimizer, "optimizer", None)
    return names


def _is_iteration(number: int | None) -> bool:
    return number is not None and 0 <= number <= MOST_ITERATIONS


def _whole(value: Any) -> int | None:
    """Return `value` as an int if it is a whole number, for example of Python, numpy or torch.

    Return None for any other value.
    """
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers, or without any
        return None
