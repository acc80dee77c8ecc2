"""Lists the parameters of a model by the names that the user knows: without wrapper prefixes, one name per storage."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

# DDP, FSDP1, torch.compile, activation checkpointing: each inserts its own level into the name.
WRAPPER_LEVELS: Final = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})


@dataclass(slots=True, eq=False)
class NamedParameter:
    """The displayed name of a parameter, other names of the same tensor (tied weights), and the module that holds it.

    The object has no reference to the parameter, so a parameter that the model replaces is freed immediately. Even a
    weak reference is not possible: torch.utils.swap_tensors rejects a tensor with a weak reference.
    """

    name: str
    owner: weakref.ref[nn.Module]
    """Weak reference to the module that has the parameter in its dictionary `_parameters`.

    Only `owner`, `key` and `home` change, when the module gives the parameter another name.
    """
    key: str
    """Key of the parameter in the dictionary `_parameters` of its module."""
    identity: int
    """The id() of the parameter object at the time when the parameters were listed."""
    shape: tuple[int, ...]
    """Shape of the parameter on this rank at the time when the parameters were listed."""
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()
    is_lazy: bool = False
    """True if the parameter had no shape yet when the parameters were listed."""
    home: weakref.ref[nn.Module] | None = None
    """Weak reference to the module whose weight the parameter was when the parameters were listed.

    None if `owner` is this module. It is another module if the weight is parametrized, or was given another name since.
    """

    @property
    def parameter(self) -> nn.Parameter | None:
        """Return the parameter.

        Return None if the module now has another object under the name of the parameter, or if the module no longer
        exists.
        """
        current = self.current()
        # A module that replaces its parameter creates the new one while it still holds the old one: the ids differ.
        return current if id(current) == self.identity else None  # type: ignore[return-value]  # the very parameter

    def current(self) -> torch.Tensor | None:
        """Return the tensor that the module currently has under the name of the parameter; None if there is none."""
        owner = self.owner()
        return None if owner is None else entry(owner._parameters, self.key)  # noqa: SLF001 - see named_parameters

    def follow(self, claimed: Container[tuple[int, str]]) -> bool:
        """Find the parameter under a new name in its module or below it.

        It has a new name after pruning, and after a parametrization was added or removed.

        Return whether it was found. `claimed` are the places of other parameters: the id() of a module and a key. A
        parameter with the same id() at such a place is a new object, because the other parameter was there before.
        """
        self.home = self.home or self.owner
        home = self.home()
        for module in () if home is None else home.modules():
            for key, parameter in module._parameters.items():  # noqa: SLF001 - see named_parameters
                if id(parameter) == self.identity and (id(module), key) not in claimed:
                    self.owner, self.key = weakref.ref(module), key
                    return True
        return False

    @property
    def module(self) -> str:
        """Return the name of the module that owns the parameter."""
        return self.name.rpartition(".")[0]


def found_in_place(parameters: Iterable[NamedParameter]) -> list[nn.Parameter | None]:
    """Return the current parameter of each element of `parameters`; None for a parameter that no longer exists.

    Each element of the result is equal to the property `parameter` of the `NamedParameter`. A call of this function
    takes a third of the time that reading the property of each element takes.
    """
    found: list[Any] = []
    reference: weakref.ref[nn.Module] | None = None
    table: Any = {}
    for named in parameters:
        if named.owner is not reference:  # otherwise the previous parameter has the same module
            reference = named.owner
            owner = reference()
            table = {} if owner is None else owner._parameters  # noqa: SLF001 - see named_parameters
        current = dict.get(table, named.key) if isinstance(table, dict) else entry(table, named.key)
        found.append(current if id(current) == named.identity else None)
    return found


def entry(table: Any, key: str) -> Any:
    """Return the value of `key` in `table`, the attribute `_parameters` or `_modules` of a module.

    Return None if the key is missing. No method of a subclass of `dict` is called: DeepSpeed's table gathers the
    parameter from all ranks when it is read during a forward pass, also when another thread reads it.
    """
    if isinstance(table, dict):
        return dict.get(table, key)
    return table[key] if key in table else None  # noqa: SIM401 - a scripted module's tables have no `get`


def encodable(text: str) -> str:
    """Return `text` with escapes for characters that UTF-8 cannot encode.

    File names and tokenizers produce such characters.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def plain_name(name: str) -> str:
    """Return the dotted `name` without the parts that wrapper modules add, such as `_orig_mod`.

    Characters that UTF-8 cannot encode are escaped.
    """
    if name.isascii() and name.isalnum():  # a single level, such as "weight" or "0"
        return name
    return encodable(".".join(level for level in name.split(".") if level not in WRAPPER_LEVELS))


def named_parameters(module: nn.Module) -> tuple[NamedParameter, ...]:
    """Return the parameters of `module` in the order of its modules.

    A tensor that several modules share appears once, under its first name, with the others as aliases.
    """
    names: dict[int, list[str]] = {}
    found: dict[int, tuple[nn.Module, str, nn.Parameter, nn.Module | None]] = {}
    parametrized: dict[int, nn.Module] = {}  # by id() of the module that has the original tensors
    for prefix, owner in module.named_modules(remove_duplicate=False):
        above = plain_name(prefix)
        holder = entry(owner._modules, "parametrizations")  # noqa: SLF001 - an attribute may be the user's
        for originals in () if holder is None else holder.children():
            parametrized[id(originals)] = owner
        # A parametrized weight is computed. The trained tensors behind it belong to submodules, which are visited too.
        for key, parameter in owner._parameters.items():  # noqa: SLF001 - the dictionary itself, to see it change
            if parameter is not None:
                own = plain_name(key)
                names.setdefault(id(parameter), []).append(f"{above}.{own}" if above and own else above or own)
                found.setdefault(id(parameter), (owner, key, parameter, parametrized.get(id(owner))))
    return tuple(_named(own, *found[number]) for number, own in names.items())


def _named(
    names: list[str], owner: nn.Module, key: str, parameter: nn.Parameter, home: nn.Module | None
) -> NamedParameter:
    lazy = is_lazy(parameter)
    return NamedParameter(
        names[0],
        weakref.ref(owner),
        key,
        id(parameter),
        shape=() if lazy else plain_shape(local_tensor(parameter).shape),
        dtype=parameter.dtype,
        aliases=tuple(names[1:]),
        is_lazy=lazy,
        home=None if home is None else weakref.ref(home),
    )


@functools.lru_cache(maxsize=1024)
def plain_shape(shape: torch.Size) -> tuple[int, ...]:
    """Return `shape` as a tuple. Parameters with equal shapes usually share one tuple."""
    return tuple(shape)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard of a DTensor on this rank, and any other tensor unchanged. There is no communication."""
    to_local = getattr(tensor, "to_local", None)
    local: torch.Tensor = to_local() if to_local is not None else tensor
    return local


def real_parts(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as a tensor of real pairs, as optimizers do. Return any other tensor unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def element_count(parameters: Iterable[NamedParameter]) -> int:
    """Return the total number of elements of the parameters on this rank."""
    return sum(math.prod(named.shape) for named in parameters)
