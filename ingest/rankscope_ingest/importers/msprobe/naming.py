"""From the names in a file to ours: a kind, a tensor or module, and the slot of a tuple."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from rankscope_contract.msprobe.csv_layout import CALLS, FEATURES, KIND_OF_FAMILY, SLOTS, parse_call

_SLOT: Final = re.compile(r"(?P<module>.*)\.(?P<slot>input|output)(?:_(?P<index>\d{1,9}))?", re.DOTALL)
_ENDING: Final = re.compile(r"(?P<module>.*)(?P<ending>\.[a-z_]+?)(?:_(?P<index>\d{1,9}))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Named:
    """What a row is of. `kind` is empty for features, where the column says it."""

    kind: str
    tensor: str
    index: int | None = None
    call_seq: int | None = None

    @property
    def described(self) -> tuple[str, str, int | None]:
        """Return what is described once, however often it is called."""
        return self.kind, self.tensor, self.index

    @property
    def module(self) -> str | None:
        """Return the module: that of a slot, or the owner of a parameter; a call has none."""
        if self.kind in CALLS:
            return None
        if any(self.kind in slots.values() for slots in SLOTS.values()):
            return self.tensor
        return self.tensor.rpartition(".")[0] or None


Naming = Callable[[str], Named | None]


def naming(family: str) -> Naming | None:
    """Return how names of `family` are read: None where the name is none of its own; None for no family we know."""
    if family in SLOTS:
        return lambda name: _slot(SLOTS[family], name)
    if family in FEATURES:
        return lambda name: _feature(FEATURES[family].suffix, name)
    if family in CALLS:
        return lambda name: _call(family, name)
    if family in KIND_OF_FAMILY:
        return lambda name: Named(str(KIND_OF_FAMILY[family]), name)
    return None


def slot(name: str, family: str) -> Named | None:
    """Return the slot of a module that `name` of the activations in `family` stands for."""
    return _slot(SLOTS[family], name)


def _slot(slots: Mapping[str, str], name: str) -> Named | None:
    match = _SLOT.fullmatch(name)
    if not match:
        return None
    return Named(str(slots[match["slot"]]), match["module"], int(match["index"]) if match["index"] else None)


def _call(kind: str, name: str) -> Named:
    tensor, call_seq, index = parse_call(name)
    return Named(kind, tensor, index, call_seq)


def _feature(suffix: str, name: str) -> Named:
    match = _ENDING.fullmatch(name)
    if not match or match["ending"] != suffix:
        return Named("", name)
    return Named("", match["module"], int(match["index"]) if match["index"] else None)
