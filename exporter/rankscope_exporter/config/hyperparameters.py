"""Convert hyper-parameters of a training to JSON values of limited size, with secrets masked.

A trainer or a script may pass any objects, such as models, datasets or classes. The result is sent to the service with
each heartbeat, so its size is limited.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import islice
from typing import Any, Final

import numpy as np
import torch

from rankscope_contract.model.redaction import redacted, redacted_text
from rankscope_exporter.process.errors import encodable

MAX_ITEMS: Final = 100
"""Maximum number of items of a list. In a longer list, a text replaces the omitted items and contains their count."""

MAX_TEXT: Final = 1_000
"""Maximum length of one text."""

MAX_CHARACTERS: Final = 65_536
"""Maximum length of the JSON text of all hyper-parameters. The longest values are omitted until the text fits."""

_DEEPEST: Final = 8
_MOST_VALUES: Final = 5_000  # limits the time for a list that contains itself
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")  # differs between the processes of a run


def storable(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return `values` as JSON values: secrets are masked, and values that have no JSON form become text.

    Enumerations are replaced by their values, dataclasses and namespaces by tables. The function accepts its own
    results and returns them unchanged.
    """
    found: dict[str, Any] = redacted({_text(name): _Conversion().value(item, 1) for name, item in values.items()})
    sizes = {name: len(json.dumps({name: value}, ensure_ascii=False)) for name, value in found.items()}
    excess = sum(sizes.values()) - MAX_CHARACTERS
    for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
        if excess <= 0:
            break
        found[name] = f"… {sizes[name]} characters omitted"
        excess -= sizes[name] - len(json.dumps({name: found[name]}, ensure_ascii=False))
    return found


class _Conversion:
    """Converts one hyper-parameter, and counts the values in it, because their number is limited."""

    _count = 0

    def value(self, value: Any, depth: int) -> Any:
        self._count += 1
        if self._count > _MOST_VALUES:
            return "…"
        if isinstance(value, Enum | np.generic):
            value = value.value if isinstance(value, Enum) else value.item()
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int) and abs(value) < 1 << 63:
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else str(float(value))
        if depth <= _DEEPEST:
            with contextlib.suppress(Exception):  # a container of the user may raise any error when it is read
                return self._container(value, depth)
        return _text(value)

    def _container(self, value: Any, depth: int) -> Any:
        if isinstance(value, Namespace):
            value = vars(value)
        elif is_dataclass(value) and not isinstance(value, type | Mapping):
            value = {item.name: getattr(value, item.name) for item in fields(value)}
        if isinstance(value, Mapping):
            return {_text(key): self.value(item, depth + 1) for key, item in value.items()}
        if isinstance(value, str | bytes) or not isinstance(value, Sequence | AbstractSet):
            return _text(value)
        ordered: Iterable[Any] = value if isinstance(value, Sequence) else sorted(value, key=_text)
        if len(value) <= MAX_ITEMS:
            return [self.value(item, depth + 1) for item in ordered]
        shown = [self.value(item, depth + 1) for item in islice(ordered, MAX_ITEMS - 1)]
        return [*shown, f"… {len(value) - len(shown)} more"]


def _text(value: Any) -> str:
    try:
        text = encodable(_described(value))
    except Exception:  # noqa: BLE001 - __str__ of an object of the user may raise any error
        text = encodable(type(value).__qualname__)
    return redacted_text(text, MAX_TEXT)


def _described(value: Any) -> str:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, torch.Tensor):  # its values may be on a device, which must not be waited for
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, torch.nn.Module):
        return type(value).__qualname__
    if hasattr(value, "__qualname__"):  # a class or a function
        return f"{value.__module__}.{value.__qualname__}"
    return _ADDRESS.sub("", str(value))
