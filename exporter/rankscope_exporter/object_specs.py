"""Which part of a module's input or output is meant: `tensor`, `tuple[2]:0`, `list[3]:1`, `dict:logits`. Pure.

The words are those of the existing tool's `targets`, and of the `module_struct.json` that helps to write them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_exporter.objects import Found, Slot

OBJECTS: Final = ("input", "output", "input_grad", "output_grad")

_SEQUENCE: Final = re.compile(r"(?:tuple|list)\[(?P<length>\d{1,6})\](?::(?P<position>\d{1,6}))?")
_GRAMMAR: Final = "'tensor', 'tuple[2]' or 'tuple[2]:0' (element 0 of two; also list[…]), or 'dict:name'"


@dataclass(frozen=True, slots=True)
class ObjectSpec:
    """A part of an object."""

    text: str
    length: int = 1
    position: int | None = None
    name: str | None = None

    @classmethod
    def parse(cls, text: Any) -> ObjectSpec:
        """Return what `text` means. Raises ValueError."""
        if text == "tensor":
            return cls(text)
        if isinstance(text, str) and text.startswith("dict:") and len(text) > len("dict:"):
            return cls(text, name=text.removeprefix("dict:"))
        match = _SEQUENCE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"{text!r} names no part of an object: it is {_GRAMMAR}")
        length, position = int(match["length"]), match["position"]
        if position is not None and int(position) >= length:
            raise ValueError(f"{text!r}: element {position} of {length} does not exist, they count from 0")
        return cls(text, length, None if position is None else int(position))

    def select(self, found: Found) -> Sequence[Slot] | None:
        """Return the tensors meant; None when the object has another form."""
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
"""By object of a module, one of OBJECTS: what of it is meant. Without any, all of everything is."""


def parse_specs(target: Any, described: Any) -> Specs:
    """Return what `parts` says of one target. Raises ValueError naming it."""
    if not isinstance(described, Mapping):
        raise ValueError(f"parts[{target!r}] is a table of {', '.join(OBJECTS)}, not {described!r}")  # noqa: TRY004 - becomes a ConfigError
    unknown = [key for key in described if key not in OBJECTS]
    if unknown:
        raise ValueError(f"parts[{target!r}]: {unknown[0]!r} is unknown; there are {', '.join(OBJECTS)}")
    try:
        return {key: ObjectSpec.parse(text) for key, text in described.items()}
    except ValueError as error:
        raise ValueError(f"parts[{target!r}]: {error}") from error
