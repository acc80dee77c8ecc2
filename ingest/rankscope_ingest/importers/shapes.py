"""Most objects of a log look like others before: what their keys mean need be found out only once.

A shape is the keys of an object and the types of its values. It is kept for plain ones only: a step and numbers, none
of which is a list, a text, absent, or has another part to play.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_ingest.importers.naming import Named

MAX_SHAPES: Final = 256
EPOCH: Final = "epoch"
_NUMBERS: Final = {int, float}
_LARGEST: Final = 1 << 53

_Key = tuple[tuple[str, ...], tuple[type, ...]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Where step and epoch stand among the values, and what the numbers are called."""

    step: int
    epoch: int | None
    numbers: tuple[tuple[int, Named], ...]


class Shapes:
    """The shapes of one log, as long as its names stay what they are."""

    def __init__(self) -> None:
        self._known: dict[_Key, Shape] = {}
        self._names = 0

    def of(self, document: Mapping[str, Any], names: int) -> Shape | None:
        """Return the shape of `document`, if it is known; `names` changes where a name may mean something else."""
        if names != self._names:
            self._known.clear()
            self._names = names
        return self._known.get((tuple(document), tuple(map(type, document.values()))))

    def learn(self, document: Mapping[str, Any], step_key: str, named: Sequence[tuple[str, Named]]) -> None:
        """Remember the shape of `document`, of which all that was found is its step and `named`."""
        types = tuple(map(type, document.values()))
        places = {key: place for place, key in enumerate(document)}
        is_plain = set(types) <= _NUMBERS and len(named) + 1 == len(places) and all(key in places for key, _ in named)
        if is_plain and type(document.get(step_key)) is int and len(self._known) < MAX_SHAPES:
            numbers = tuple((places[key], name) for key, name in named)
            self._known[tuple(document), types] = Shape(places[step_key], places.get(EPOCH), numbers)


def is_plain_number(value: float) -> bool:
    """Return whether a number needs no care: whole ones may be beyond what a float holds."""
    return type(value) is float or -_LARGEST < value < _LARGEST
