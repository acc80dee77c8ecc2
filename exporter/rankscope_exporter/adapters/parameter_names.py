"""Lists the parameters of a model by the names that the user knows: without wrapper prefixes, one name per storage.

Selection by name: exact name, glob, or regular expression. The functions have no side effects.

Lists the modules of a model by the names that the user knows, with one name per module.
"""

from __future__ import annotations

import difflib
import inspect
import re
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from rankscope_contract.model.redaction import MAX_NAME, short_name
from rankscope_exporter.adapters import torch_private
from rankscope_exporter.process.errors import encodable

REGEX: Final = "re:"
_SAID: Final = re.compile(r"re:\(\?#([^()]*)\)")
"""A regular expression that matches the beginning of a name pattern which `regex_pattern` made.

The beginning of the name pattern contains the name that messages display, as a comment of the regular expression.
"""


class Targets:
    """Patterns for names.

    A pattern is an exact name, a glob, or a regular expression after "re:", and must match the whole name.

    Raises ValueError if `patterns` is not a list of names, or if a regular expression is invalid.
    """

    def __init__(self, patterns: Sequence[str] = ("*",)) -> None:
        is_list = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"targets must be a list of names, not {patterns!r}")
        self.patterns = tuple(patterns)
        self._exact = frozenset(patterns)
        self.selects_all = "*" in self._exact
        self._compiled = [(pattern, _compiled(pattern)) for pattern in self.patterns]

    def selects(self, *names: str) -> bool:
        """Return whether the patterns select one of the `names` of an object."""
        return self.selects_all or any(
            name in self._exact or any(compiled.fullmatch(name) for _, compiled in self._compiled) for name in names
        )

    def chooses(self, item: NamedParameter | NamedModule) -> bool:
        """Return whether the patterns select `item` by its displayed name or another name."""
        return self.selects(item.name, *item.aliases)

    def unmatched(self, names: Sequence[str]) -> list[str]:
        """Return the patterns that select none of `names`."""
        return [
            pattern
            for pattern, compiled in self._compiled
            if pattern != "*" and not any(name == pattern or compiled.fullmatch(name) for name in names)
        ]


def regex_pattern(name: str, expression: str) -> str:
    """Return a pattern for the regular expression `expression`. Messages display the pattern as `name`."""
    return f"{REGEX}{expression}" if set(name) & {"(", ")"} else f"{REGEX}(?#{name}){expression}"


def display_name(pattern: str) -> str:
    """Return the name that messages display for `pattern`: that given to `regex_pattern`, or the pattern itself."""
    found = _SAID.match(pattern)
    return pattern if found is None else found[1]


def target_notices(targets: Targets, names: Iterable[str], of: str) -> list[str]:
    """Return a sentence for each target that selects none of `names`, with the most similar; `of` is their kind."""
    known, notices = list(names), []
    for target in map(display_name, targets.unmatched(known)):
        near = difflib.get_close_matches(target.removeprefix(REGEX), known, n=3, cutoff=0.4)
        notices.append(f"target {target!r} matches no {of}" + (f"; nearest: {', '.join(near)}" if near else ""))
    return notices


def _compiled(pattern: str) -> re.Pattern[str]:
    if not pattern.startswith(REGEX):
        return re.compile(translate(pattern))
    try:
        return re.compile(pattern.removeprefix(REGEX))
    except re.error as error:
        raise ValueError(f"target {pattern!r} is not a valid regular expression: {error}") from error


@dataclass(slots=True, eq=False)
class NamedParameter:
    """The displayed name of a parameter, other names of the same tensor (tied weights), and the module that holds it.

    The object has no reference to the parameter, so a parameter that the model replaces is freed immediately. Even a
    weak reference is not possible: torch.utils.swap_tensors rejects a tensor with a weak reference.
    """

    name: str
    owner: weakref.ref[nn.Module]
    """Weak reference to the module that has the parameter in its dictionary `_parameters`.

    Only `owner`, `key` and `home` change, when the parameter gets another name or is in another module.
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
    memory: tuple[StorageWeakRef, ...] = ()
    """Weak reference to the storage of the parameter when parameters were listed; empty if it is no plain tensor."""

    @property
    def parameter(self) -> nn.Parameter | None:
        """Return the parameter; None if its module has another object under its name, or no longer exists."""
        owner = self.owner()
        table = {} if owner is None else torch_private.parameters_of(owner)
        current = dict.get(table, self.key) if isinstance(table, dict) else torch_private.entry(table, self.key)
        # A module that replaces its parameter creates the new one while it still holds the old one: the ids differ.
        return current if id(current) == self.identity else None

    def current(self) -> torch.Tensor | None:
        """Return the tensor that the module currently has under the name of the parameter; None if there is none."""
        owner = self.owner()
        table = {} if owner is None else torch_private.parameters_of(owner)
        return dict.get(table, self.key) if isinstance(table, dict) else torch_private.entry(table, self.key)

    def follow(self, claimed: Container[tuple[int, str]]) -> bool:
        """Find the parameter under a new name in its module or below it.

        It has a new name after pruning, and after a parametrization was added or removed.

        Return whether it was found. `claimed` are the places of other parameters: the id() of a module and a key. A
        parameter with the same id() at such a place is a new object, because the other parameter was there before.
        """
        self.home = self.home or self.owner
        home = self.home()
        for module in () if home is None else home.modules():
            for key, parameter in torch_private.parameters_of(module).items():
                if id(parameter) == self.identity and (id(module), key) not in claimed:
                    self.owner, self.key = weakref.ref(module), key
                    return True
        return False

    def move(self, places: Mapping[int, Place]) -> bool:
        """Find the parameter in another module of the model; return whether it was found.

        `places` are those of all parameters of the model, by id(). A new object may have the id() of a freed one, and
        no new storage has the address of a storage with a weak reference.
        """
        module, key, parameter = places.get(self.identity, (None, "", None))
        if module is None or not self.memory or self.memory != _memory_of(parameter):
            return False
        self.owner, self.key, self.home = weakref.ref(module), key, None
        return True

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


Place = tuple[nn.Module, str, torch.Tensor | None]
"""The module that has a parameter, the key of the parameter in its dictionary `_parameters`, and the parameter."""


def _memory_of(parameter: torch.Tensor | None) -> tuple[StorageWeakRef, ...]:
    if type(parameter) is nn.Parameter and parameter.layout is torch.strided:
        return (StorageWeakRef(parameter.untyped_storage()),)  # type: ignore[no-untyped-call]  # untyped in torch
    return ()


def found_in_place(parameters: Iterable[NamedParameter]) -> list[nn.Parameter | None]:
    """Return the property `parameter` of each of the parameters, in half of the time."""
    found: list[Any] = []
    reference: weakref.ref[nn.Module] | None = None
    table: Any = {}
    for named in parameters:
        if named.owner is not reference:  # otherwise the previous parameter has the same module
            reference = named.owner
            owner = reference()
            table = {} if owner is None else torch_private.parameters_of(owner)
        current = dict.get(table, named.key) if isinstance(table, dict) else torch_private.entry(table, named.key)
        found.append(current if id(current) == named.identity else None)
    return found


def plain_name(name: str) -> str:
    """Return the dotted `name` without parts of wrappers, such as `_orig_mod`, encodable in UTF-8, and cut if long."""
    if name.isascii() and name.isalnum() and len(name) <= MAX_NAME:  # a single level, such as "weight" or "0"
        return name
    return short_name(
        encodable(".".join(level for level in name.split(".") if level not in torch_private.WRAPPER_LEVELS))
    )


def named_parameters(module: nn.Module) -> tuple[NamedParameter, ...]:
    """Return the parameters of `module` in the order of its modules.

    A tensor that several modules share appears once, under its first name, with the others as aliases.
    """
    names: dict[int, list[str]] = {}
    found: dict[int, tuple[nn.Module, str, nn.Parameter, nn.Module | None]] = {}
    parametrized: dict[int, nn.Module] = {}  # by id() of the module that has the original tensors
    for prefix, owner in module.named_modules(remove_duplicate=False):
        above = plain_name(prefix)
        holder = torch_private.entry(torch_private.submodules_of(owner), "parametrizations")
        for originals in () if holder is None else holder.children():
            parametrized[id(originals)] = owner
        # A parametrized weight is computed. The trained tensors behind it belong to submodules, which are visited too.
        for key, parameter in torch_private.parameters_of(owner).items():
            if parameter is not None:
                own = plain_name(key)
                names.setdefault(id(parameter), []).append(
                    short_name(f"{above}.{own}" if above and own else above or own)
                )
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
        shape=() if lazy else TensorSpec.of(parameter).shape,
        dtype=parameter.dtype,
        aliases=tuple(names[1:]),
        is_lazy=lazy,
        home=None if home is None else weakref.ref(home),
        memory=_memory_of(parameter),
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard of a DTensor on this rank, and any other tensor unchanged. There is no communication."""
    to_local = getattr(tensor, "to_local", None)
    local: torch.Tensor = to_local() if to_local is not None else tensor
    return local


class TensorSpec(NamedTuple):
    """The shape and the dtype of a tensor on this rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Return the shape and dtype of the part of `tensor` that is on this rank."""
        local = local_tensor(tensor)
        return TensorSpec(tuple(local.shape), local.dtype)


def is_temporarily_replaced(current: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether a plain tensor temporarily replaces a parameter, as during `torch.func.functional_call`."""
    return current is not None and not isinstance(current, nn.Parameter)


def real_parts(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as a tensor of real pairs, as optimizers do. Return any other tensor unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


@dataclass(frozen=True, slots=True)
class NamedModule:
    """A callable module with its displayed name (empty for the model itself) and its other names.

    The reference to the module is weak, so that a layer that the training removes is freed.
    """

    name: str
    reference: weakref.ref[nn.Module]
    aliases: tuple[str, ...] = ()
    compiled: bool = False  # part of compiled code, in which no hook is called

    @property
    def module(self) -> nn.Module | None:
        return self.reference()


def named_modules(root: nn.Module) -> tuple[NamedModule, ...]:
    """Return the modules of `root` in the order of definition.

    A wrapper and the module that it wraps have the same name. The wrapped module is returned, because the user wrote
    it. The wrapper of `torch.compile` is an exception: the wrapper is returned, because hooks do not run inside of it.
    """
    under: dict[str, tuple[nn.Module, bool]] = {}
    regions: list[str] = []  # full names of compiled modules
    wrappers: set[str] = set()
    for full, module in root.named_modules(remove_duplicate=False):
        name = plain_name(full)
        compiles = torch_private.compiled_module(module) is not None
        if compiles:
            regions.append(f"{full}.{torch_private.ORIGINAL}" if full else torch_private.ORIGINAL)
            wrappers.add(name)
        elif torch_private.compiled_call(module) is not None:
            regions.append(full)
        inside = any(f"{full}.".startswith(f"{region}.") or not region for region in regions)
        if compiles or not (inside and name in wrappers):
            under[name] = module, inside
    names: dict[int, list[str]] = {}
    for name, (module, _) in under.items():
        if _can_be_called(module):
            names.setdefault(id(module), []).append(name)
    return tuple(
        NamedModule(own[0], weakref.ref(under[own[0]][0]), tuple(own[1:]), under[own[0]][1]) for own in names.values()
    )


def _can_be_called(module: nn.Module) -> bool:
    return defines_forward(type(module)) or "forward" in module.__dict__


def defines_forward(kind: type[nn.Module]) -> bool:
    """Return whether `kind` defines `forward`; a normal attribute access fails for a scripted module."""
    return inspect.getattr_static(kind, "forward") is not inspect.getattr_static(nn.Module, "forward")
