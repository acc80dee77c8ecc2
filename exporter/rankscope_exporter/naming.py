"""Names of parameters as the user knows them: without the prefixes that wrappers add, one per storage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import torch
from torch import nn

# DDP, FSDP1, torch.compile, activation checkpointing: each inserts its own level into the name.
WRAPPER_LEVELS: Final = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter, the name shown for it, and the other names of the same tensor (tied weights)."""

    name: str
    parameter: nn.Parameter
    aliases: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Return the name of the module that owns the parameter."""
        return self.name.rpartition(".")[0]


def plain_name(name: str) -> str:
    """Return `name` without the levels that wrapping modules inserted."""
    return ".".join(level for level in name.split(".") if level not in WRAPPER_LEVELS)


def named_parameters(module: nn.Module, patterns: Sequence[str] = ("*",)) -> tuple[NamedParameter, ...]:
    """Return the parameters whose name (or alias) matches one of the glob `patterns`, in module order.

    A tensor that several modules share appears once, under its first name, with the others as aliases.
    """
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain_name(name))
        parameters[id(parameter)] = parameter
    return tuple(
        NamedParameter(own[0], parameters[key], tuple(own[1:]))
        for key, own in names.items()
        if any(fnmatchcase(name, pattern) for name in own for pattern in patterns)
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a sharded tensor that lies on this rank; any other tensor as it is. No communication."""
    to_local = getattr(tensor, "to_local", None)
    local: torch.Tensor = to_local() if to_local is not None else tensor
    return local


def element_count(parameters: Iterable[NamedParameter]) -> int:
    """Return how many elements the parameters have together on this rank."""
    return sum(local_tensor(named.parameter).numel() for named in parameters)
