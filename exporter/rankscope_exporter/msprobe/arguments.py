"""What `TrainerMon` and `set_monitor` are given: both orders that exist are told apart by type.

The manual prints `(model, grad_acc_steps, optimizer, dp_group, tp_group, start_iteration)`, the tool itself takes
`(model, optimizer, grad_acc_steps, tp_group, dp_group, start_iteration)`, and its constructor has had two orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from rankscope_exporter.checks import whole
from rankscope_exporter.errors import ConfigError
from rankscope_exporter.frameworks import are_chunks

AS_IN_THE_MANUAL: Final = ("grad_acc_steps", "optimizer", "dp_group", "tp_group", "start_iteration")
AS_IN_THE_CODE: Final = ("optimizer", "grad_acc_steps", "tp_group", "dp_group", "start_iteration")
_OF_CONSTRUCTION: Final = ("process_group", "params_have_main_grad", "opt_ty")
_MISPRINTED: Final = {"param_have_main_grad": "params_have_main_grad"}
"""The manual has both spellings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Construction:
    """Arguments of the constructor behind the configuration; None is not said."""

    process_group: Any = None
    params_have_main_grad: bool | None = None
    opt_ty: str | None = None

    @classmethod
    def of(cls, positional: Sequence[Any], named: Mapping[str, Any]) -> Construction:
        """Return the arguments by name. Raises ConfigError."""
        given = {_MISPRINTED.get(name, name): value for name, value in named.items()}
        places = list(_OF_CONSTRUCTION)
        for value in positional:
            place = _place_of(value, places)
            # A flag or a name in the second place is meant for the place of its type: older releases had no group.
            _put(given, place, value, "TrainerMon")
            del places[: places.index(place) + 1]
        _check_names(given, _OF_CONSTRUCTION, "TrainerMon")
        made = cls(**given)
        group = made.process_group
        if group is not None and not callable(getattr(group, "rank", None)):
            raise ConfigError(f"process_group is the pipeline's group of ranks or None, not {group!r}")
        if not isinstance(made.params_have_main_grad, bool | None):
            raise ConfigError(f"params_have_main_grad is True or False, not {made.params_have_main_grad!r}")
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Arguments of `set_monitor`."""

    model: Any
    optimizer: Any = None
    grad_acc_steps: Any = 1
    dp_group: Any = None
    tp_group: Any = None
    start_iteration: Any = 0

    @classmethod
    def of(cls, call: str, positional: Sequence[Any], named: Mapping[str, Any]) -> Attachment:
        """Return the arguments of the function `call` by name, in whichever order they came. Raises ConfigError."""
        given = dict(named)
        names: tuple[str, ...] = ("model",)
        if len(positional) > 1:
            names += AS_IN_THE_MANUAL if _is_number(positional[1]) else AS_IN_THE_CODE
        if len(positional) > len(names):
            raise ConfigError(f"{call} takes {len(names)} arguments by position, not {len(positional)}: name them")
        for name, value in zip(names, positional, strict=False):
            _put(given, name, value, call)
        _check_names(given, ("model", *AS_IN_THE_CODE), call)
        if "model" not in given:
            raise ConfigError(f"{call} needs the model: {call}(model, optimizer=optimizer)")
        return cls(**given)

    @property
    def chunks(self) -> Sequence[Any]:
        """The model's chunks; one alone unless the pipeline is virtual."""
        return self.model if isinstance(self.model, list | tuple) else [self.model]

    @property
    def watched(self) -> torch.nn.Module | list[torch.nn.Module]:
        """What of the model is monitored: all chunks where they are known to be that, else the first."""
        return list(self.chunks) if len(self.chunks) > 1 and are_chunks(self.chunks) else self.chunks[0]

    def check(self, call: str) -> None:
        """Raise ConfigError where model and optimizer cannot be what they are given as."""
        if isinstance(self.optimizer, torch.nn.Module) and not isinstance(self.model, torch.nn.Module):
            raise ConfigError(f"{call}: model and optimizer are the other way round")
        if not self.chunks or not all(isinstance(module, torch.nn.Module) for module in self.chunks):
            raise ConfigError(f"{call}: model is a torch module or a list of its chunks, not {_type(self.model)}")
        if self.optimizer is None:
            raise ConfigError(f"{call} needs the optimizer: {call}(model, optimizer=optimizer)")
        optimizers = self.optimizer if isinstance(self.optimizer, list | tuple) else [self.optimizer]
        if not optimizers or not all(callable(getattr(item, "step", None)) for item in optimizers):
            raise ConfigError(f"{call}: optimizer is a torch optimizer or wraps one, not {_type(self.optimizer)}")


def _place_of(value: Any, places: Sequence[str]) -> str:
    wanted = "params_have_main_grad" if isinstance(value, bool) else "opt_ty" if isinstance(value, str) else None
    if wanted is not None and wanted in places:
        return wanted
    if not places:
        raise ConfigError("TrainerMon takes config_file_path, process_group, params_have_main_grad and opt_ty")
    return places[0]


def _put(given: dict[str, Any], name: str, value: Any, call: str) -> None:
    if name in given:
        raise ConfigError(f"{call}: {name} is given by position and by name; give it once")
    given[name] = value


def _check_names(given: Mapping[str, Any], known: Sequence[str], call: str) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(f"{call} has no argument {unknown[0]!r}; there are {', '.join(known)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or whole(value) is not None


def _type(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a list of {', '.join(sorted({type(item).__name__ for item in value})) or 'nothing'}"
    return f"a {type(value).__name__}"
