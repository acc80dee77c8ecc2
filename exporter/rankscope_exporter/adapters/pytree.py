"""Finds the tensors in the arguments and results of a module, assigns numbers to them, and selects them by patterns.

No element of a tensor is read. The tensors among the arguments of a call are numbered from 0, first those in positional
arguments. If an element of a result is a tensor, its number is the position of the element. A single tensor has no
number. Tensors inside of nested containers are numbered in order, after the tensors that are not nested. The patterns
(`tensor`, `tuple[2]:0`, `list[3]:1`, `dict:logits`) are those of `module_struct.json`, which lists the valid patterns
of a model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MemberDescriptorType
from typing import Any, Final, NamedTuple

import torch

MAX_DEPTH: Final = 4
MAX_TENSORS: Final = 128
"""Maximum number of tensors that are found in one object.

Further tensors of an object, such as a cache of 1,000 tensors, are not measured as activations.
"""

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type)


@dataclass(slots=True)
class Slot:
    """One tensor in the arguments or in the result of a module.

    It has a number, a path such as `[0].logits`, and the position of the element of the arguments or result that
    contains it.
    """

    index: int | None
    path: str
    tensor: torch.Tensor
    top: int = 0


class Found(NamedTuple):
    """The tensors that were found in the arguments or in the result of a module."""

    slots: Sequence[Slot]
    length: int = 1  # elements of the object itself
    tensors: int = 0  # for arguments: number of numbered tensors
    unknown: tuple[str, ...] = ()  # types that were not searched, and a text about omitted tensors


def received(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Found:
    """Return the tensors among the positional and keyword arguments of a call."""
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        return Found((Slot(None, "[0]", args[0]),), tensors=1)
    items = [(f"[{number}]", value) for number, value in enumerate(args)]
    items += [(f".{name}", value) for name, value in kwargs.items()]
    slots, unknown = _walk(items)
    # An argument that is not a tensor has no number.
    ordered = sorted(slots, key=lambda slot: slot.index is None)
    alone = len(ordered) == 1
    numbered = [dataclasses.replace(slot, index=None if alone else number) for number, slot in enumerate(ordered)]
    return Found(numbered, len(items), len(numbered), unknown)


def returned(output: Any) -> Found:
    """Return the tensors in the result of a call."""
    if isinstance(output, torch.Tensor):
        return Found((Slot(None, "", output),))
    items, path = children(output), ""
    while items is not None and len(items) == 1:
        name, value = items[0]
        path += name
        if isinstance(value, torch.Tensor):
            return Found((Slot(None, path, value),))
        items = children(value) if path.count("[") + path.count(".") < MAX_DEPTH else None
    if items is None:
        return Found((), unknown=() if isinstance(output, _PLAIN) else (type(output).__name__,))
    slots, unknown = _walk(items, path)
    deeper = itertools.count(len(items))
    for slot in slots:
        slot.index = next(deeper) if slot.index is None else slot.index
    return Found(slots, len(items), unknown=unknown)


def children(value: Any) -> list[tuple[str, Any]] | None:
    """Return the elements of a container, each with the text that selects it in a path, such as `[0]` or `.logits`.

    Return None if `value` is not a container. No code of a class of the script runs, because a batch may load its
    elements, or draw random numbers, when they are read. Mappings other than dictionaries are therefore not searched.
    """
    if isinstance(value, tuple | list):
        items = [*(tuple if isinstance(value, tuple) else list).__iter__(value)]  # type: ignore[arg-type]  # see above
        names = getattr(type(value), "_fields", None)
        if names is not None and len(names) == len(items):
            return [(f".{name}", item) for name, item in zip(names, items, strict=True)]
        return [(f"[{number}]", item) for number, item in enumerate(items)]
    if isinstance(value, UserDict):  # a batch of a tokenizer
        value = _attribute(value, "data")
    if isinstance(value, dict):
        return [
            (f".{key}" if isinstance(key, str) else f"[{number}]", item)
            for number, (key, item) in enumerate(dict.items(value))
        ]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", _attribute(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute that is stored in `value`; None if only code of its class could compute it."""
    with contextlib.suppress(AttributeError, KeyError):
        return object.__getattribute__(value, "__dict__")[name]
    slots = (vars(cls).get(name) for cls in type(value).__mro__)
    slot = next((slot for slot in slots if isinstance(slot, MemberDescriptorType)), None)
    with contextlib.suppress(AttributeError):  # the slot is empty
        return None if slot is None else slot.__get__(value)
    return None


def _walk(items: Sequence[tuple[str, Any]], path: str = "") -> tuple[list[Slot], tuple[str, ...]]:
    """Return a `Slot` for each tensor in `items`, and the names of types that were not searched.

    The number of a tensor that is itself an item is its position in `items`. The number of a tensor inside of an item
    is None.
    """
    slots: list[Slot] = []
    unknown: dict[str, None] = {}
    for position, (name, value) in enumerate(items):
        if isinstance(value, torch.Tensor):
            slots.append(Slot(position, path + name, value, position))
            continue
        for where, item in _deeper(value, path + name, 1):
            if isinstance(item, torch.Tensor):
                slots.append(Slot(None, where, item, position))
            elif not isinstance(item, _PLAIN) and not callable(item):
                unknown[type(item).__name__] = None
    if len(slots) > MAX_TENSORS:
        unknown[f"{len(slots) - MAX_TENSORS} tensors beyond the first {MAX_TENSORS}"] = None
    return slots[:MAX_TENSORS], tuple(unknown)


def _deeper(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    inner = children(value) if depth < MAX_DEPTH and not isinstance(value, torch.Tensor) else None
    if inner is None:
        yield path, value
        return
    for name, item in inner:
        yield from _deeper(item, path + name, depth + 1)


OBJECTS: Final = ("input", "output", "input_grad", "output_grad")

_SEQUENCE: Final = re.compile(r"(?:tuple|list)\[(?P<length>\d{1,6})\](?::(?P<position>\d{1,6}))?")
_GRAMMAR: Final = "'tensor', 'tuple[2]' or 'tuple[2]:0' (element 0 of two; also list[…]), or 'dict:name'"


@dataclass(frozen=True, slots=True)
class ObjectSpec:
    """A pattern that selects tensors of an argument or result, such as `tensor`, `tuple[2]:0` or `dict:logits`."""

    text: str
    length: int = 1
    position: int | None = None
    name: str | None = None

    @classmethod
    def parse(cls, text: Any) -> ObjectSpec:
        """Parse the pattern in `text` and return it. Raises ValueError if the text is not a valid pattern."""
        if text == "tensor":
            return cls(text)
        if isinstance(text, str) and text.startswith("dict:") and len(text) > len("dict:"):
            return cls(text, name=text.removeprefix("dict:"))
        match = _SEQUENCE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"{text!r} does not select an element of an argument or result: write {_GRAMMAR}")
        length, position = int(match["length"]), match["position"]
        if position is not None and int(position) >= length:
            raise ValueError(f"{text!r}: element {position} of {length} does not exist; elements count from 0")
        return cls(text, length, None if position is None else int(position))

    def select(self, found: Found) -> Sequence[Slot] | None:
        """Return the tensors in `found` that the pattern selects.

        Return None if the argument or result does not have the form that the pattern describes, such as a tuple of two
        elements.
        """
        slots = found.slots
        if self.name is not None:
            inside = re.compile(rf"\.{re.escape(self.name)}(?![^.\[])")
            chosen = [slot for slot in slots if inside.match(slot.path)]
            return chosen or None
        if self.text == "tensor" or self.length == len(slots) == 1:
            return slots if len(slots) == 1 else None
        if self.length not in {found.length, found.tensors}:
            return None
        if self.position is None:
            return slots
        by_place = self.length == found.length
        return [slot for slot in slots if (slot.top if by_place else slot.index) == self.position]


Specs = Mapping[str, ObjectSpec]
"""Patterns that select tensors of a module. The keys are `input`, `output`, `input_grad` and `output_grad`.

If a key is missing, all tensors of the kind that the key names are selected.
"""


def parse_specs(target: Any, described: Any) -> Specs:
    """Parse `described`, the patterns that select tensors of the modules that `target` selects, and return them.

    `target` is a key of the option `parts`. If `described` is invalid, raise a ValueError that names `target`.
    """
    if not isinstance(described, Mapping):
        raise ValueError(f"parts[{target!r}] must be a table of {', '.join(OBJECTS)}, not {described!r}")  # noqa: TRY004 - becomes a ConfigError
    unknown = [key for key in described if key not in OBJECTS]
    if unknown:
        raise ValueError(f"parts[{target!r}]: {unknown[0]!r} is unknown; valid names are {', '.join(OBJECTS)}")
    try:
        return {key: ObjectSpec.parse(text) for key, text in described.items()}
    except ValueError as error:
        raise ValueError(f"parts[{target!r}]: {error}") from error
