"""Convert the state of an import to JSON and back, so that the next import of the log reads only its new lines.

The state is the objects that read the log: parser, axis, decisions, rules. Like pickle, the module stores the
attributes of each object, or the result of its `__getstate__`, and each object once. Unlike pickle, it creates only
objects of this product.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import importlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from rankscope_contract.model.redaction import MASK, MAX_DOCUMENT, is_secret_name, redacted_text

MAX_STATE: Final = 16 << 20
"""Largest number of characters of a state. Without a state, the next import reads the log from its beginning."""

_SHORTEST_SECRET: Final = 16
_PREFIX: Final = "rankscope_"
_CONTAINERS: Final[Mapping[str, type]] = {"list": list, "tuple": tuple, "set": set, "dict": dict, "Counter": Counter}
_TEXTS: Final[Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]]] = {
    "float": (float, repr, float),
    "time": (dt.datetime, dt.datetime.isoformat, dt.datetime.fromisoformat),
    "path": (type(Path()), lambda value: redacted_text(str(value)), Path),
    "pattern": (re.Pattern, lambda value: [value.pattern, value.flags], lambda found: re.compile(*found)),
    "array": (np.ndarray, lambda value: [value.dtype.str, value.tolist()], lambda found: np.array(found[1], found[0])),
}


def encoded(value: Any) -> list[Any] | None:
    """Return `value` as a list that JSON can represent, with secrets masked; None if it would be too long.

    Raises TypeError for a value that is no number, text, container or object of this product.
    """
    table = _Encoder().table(value)
    return table if len(json.dumps(table, allow_nan=False)) <= MAX_STATE else None


def decoded(table: Any) -> Any:
    """Return the value that `encoded` has converted. Raises ValueError for any other list."""
    try:
        return _Decoder(table).value([0])
    except (LookupError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(f"the state of an import is invalid: {error!r}") from error


class _Encoder:
    """Numbers the containers and objects of one value; another occurrence of an object refers to its number."""

    def __init__(self) -> None:
        self._rows: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no other object gets the id of one

    def table(self, value: Any) -> list[Any]:
        self._row(value)
        return self._rows

    def _of(self, value: Any) -> Any:
        value = value.item() if isinstance(value, np.generic) else value
        if value is None or type(value) in {bool, int} or (type(value) is float and math.isfinite(value)):
            return value
        if type(value) is str:
            return redacted_text(value, MAX_DOCUMENT) if len(value) >= _SHORTEST_SECRET else value
        for name, (kind, encode, _) in _TEXTS.items():
            if type(value) is kind:
                return {name: encode(value)}
        if isinstance(value, enum.Enum):
            return {"enum": [_name_of(type(value)), value.value]}
        return [self._row(value)]

    def _row(self, value: Any) -> int:
        if id(value) in self._numbers:
            return self._numbers[id(value)]
        number = self._numbers[id(value)] = len(self._rows)
        self._kept.append(value)
        self._rows.append(None)
        kind = next((name for name, kind in _CONTAINERS.items() if type(value) is kind), None)
        if kind is None:
            state = [(name, self._of(part)) for name, part in _attributes(value).items()]
            row = [_name_of(type(value)), *chain(*state)]
        elif isinstance(value, dict):
            row = [kind, *map(self._of, chain(*map(_masked, value.items())))]
        else:
            row = [kind, *map(self._of, value)]
        self._rows[number] = row
        return number


class _Decoder:
    """Creates the objects of a table, each once."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._made: dict[int, Any] = {}

    def value(self, encoded: Any) -> Any:
        """Return the value of a cell of the table."""
        if isinstance(encoded, list):
            return self._object(encoded[0])
        if not isinstance(encoded, dict):
            return encoded
        ((name, content),) = encoded.items()
        return _class(content[0])(content[1]) if name == "enum" else _TEXTS[name][2](content)

    def _object(self, number: int) -> Any:
        if number in self._made:
            return self._made[number]
        name, *cells = self._table[number]
        if name == "tuple":
            made = self._made[number] = tuple(map(self.value, cells))
            return made
        kind: Any = _CONTAINERS.get(name) or _class(name)
        made = self._made[number] = kind.__new__(kind)
        if name in {"list", "set"}:
            (made.extend if name == "list" else made.update)(map(self.value, cells))
            return made
        state = {self.value(key): self.value(cell) for key, cell in zip(cells[::2], cells[1::2], strict=True)}
        if isinstance(made, dict):
            made.update(state)
        elif hasattr(made, "__setstate__") and not dataclasses.is_dataclass(made):
            made.__setstate__(state)
        else:
            for key, attribute in state.items():
                object.__setattr__(made, key, attribute)  # of a frozen class, too
        return made


def _masked(item: tuple[Any, Any]) -> tuple[Any, Any]:
    key, value = item
    return key, MASK if isinstance(key, str) and isinstance(value, str) and is_secret_name(key) else value


def _attributes(value: Any) -> dict[str, Any]:
    """Return the state of an object of this product: the items of a dictionary, or its attributes."""
    if isinstance(value, dict):
        return dict(value)
    if dataclasses.is_dataclass(value):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    state = value.__getstate__()
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    return {**(attributes or {}), **(slots or {})}


def _name_of(kind: type) -> str:
    if not kind.__module__.startswith(_PREFIX):
        raise TypeError(f"an object of {kind.__module__}.{kind.__qualname__} cannot be part of the state of an import")
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str) -> Any:
    module, _, qualified = name.partition(":")
    if not module.startswith(_PREFIX):
        raise ValueError(f"{name} is no class of this product")
    found: Any = importlib.import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    return found
