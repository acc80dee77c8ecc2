"""`squash_name`: names without what wraps the model, such as `layers.0.weight` for `module.decoder.layers.0.weight`."""

from __future__ import annotations

import re
from typing import Final

_TAILS: Final = tuple(
    re.compile(rf"(?s:.*)\.({word}(?s:.*))") for word in (r"layers?\.", r"embeddings?\.", "final", "output", "norm")
)
"""In the tool's order; the first that occurs behind a dot decides, at its last occurrence."""


def squashed(name: str) -> str:
    """Return what the tool leaves of `name`."""
    for tail in _TAILS:
        if match := tail.fullmatch(name):
            return match[1]
    return name


class Squash:
    """Gives names out; two that would become one keep apart, the later one as it is."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}
        self._taken: set[str] = set()

    def __call__(self, name: str) -> str:
        """Return the name under which `name` is shown, the same at every call."""
        known = self._given.get(name)
        if known is None:
            short = squashed(name)
            known = self._given[name] = name if short in self._taken else short
            self._taken.add(known)
        return known
