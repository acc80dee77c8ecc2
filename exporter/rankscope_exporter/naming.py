"""Names of parameters as the user knows them: without the prefixes that wrappers add, one per storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

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
    holder: Mapping[str, nn.Parameter | None] = field(default_factory=dict, repr=False)
    """The `_parameters` of the module that owns it, where it stands under `key`."""
    key: str = ""

    def current(self) -> torch.Tensor | None:
        """Return what the module uses under this name now."""
        return entry(self.holder, self.key) if self.holder else self.parameter

    @property
    def module(self) -> str:
        """Return the name of the module that owns the parameter."""
        return self.name.rpartition(".")[0]


def entry(table: Any, key: str) -> Any:
    """Return what stands under `key` in a module's `_parameters` or `_modules`, None where nothing does."""
    return table[key] if key in table else None  # noqa: SIM401 - a scripted module's tables have no `get`


def encodable(text: str) -> str:
    """Return `text` with what UTF-8 cannot say written out: file names and tokenizers give such strings."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def plain_name(name: str) -> str:
    """Return `name` without the levels that wrapping modules inserted, in letters that can be told."""
    return encodable(".".join(level for level in name.split(".") if level not in WRAPPER_LEVELS))


def named_parameters(module: nn.Module) -> tuple[NamedParameter, ...]:
    """Return the parameters in module order.

    A tensor that several modules share appears once, under its first name, with the others as aliases.
    """
    names: dict[int, list[str]] = {}
    found: dict[int, tuple[nn.Parameter, Mapping[str, nn.Parameter | None], str]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        # A parametrized weight is computed, not held: what is trained are the tensors behind it, found as modules.
        for key, parameter in owner._parameters.items():  # noqa: SLF001 - the dictionary itself, to see it change
            if parameter is not None:
                names.setdefault(id(parameter), []).append(plain_name(f"{prefix}.{key}" if prefix else key))
                found.setdefault(id(parameter), (parameter, owner._parameters, key))  # noqa: SLF001 - see above
    return tuple(
        NamedParameter(own[0], found[number][0], tuple(own[1:]), found[number][1], found[number][2])
        for number, own in names.items()
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a sharded tensor that lies on this rank; any other tensor as it is. No communication."""
    to_local = getattr(tensor, "to_local", None)
    local: torch.Tensor = to_local() if to_local is not None else tensor
    return local


def real_parts(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a complex tensor as pairs of real ones, as optimizers take them; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def element_count(parameters: Iterable[NamedParameter]) -> int:
    """Return how many elements the parameters have together on this rank."""
    return sum(local_tensor(named.parameter).numel() for named in parameters)
