"""Names as the existing tool writes them, as patterns that find the same modules and parameters here. Pure.

There a name carries the number of its model chunk (`0:`), the level that DDP adds (`module.`), and with `squash_name`
it may be cut to its tail. A module is named exactly; a parameter by itself, or by the module that holds it.
"""

from __future__ import annotations

import re
from typing import Final

from rankscope_exporter.naming import plain_name
from rankscope_exporter.sampling.targets import made_of

_CHUNK: Final = re.compile(r"\d+:")
_WRAPPER: Final = re.compile(r"(?:module\.)+|module$")
_TAIL: Final = re.compile(r"(?:layers?|embeddings?)\.|final|output|norm")
"""How a name begins that the tool has cut to its tail."""


def module_pattern(target: str, *, squashed: bool = False) -> str:
    """Return the pattern of the module `target`; `squashed`: it may be the tail of a name."""
    name, wrapped, cut = _parts(target, squashed=squashed)
    if not wrapped and not cut:
        return name
    return made_of(name, f"{_before(wrapped=wrapped, cut=cut)}{re.escape(name)}")


def parameter_pattern(target: str, *, squashed: bool = False) -> str:
    """Return the pattern of the parameter `target`, or of all parameters in the module `target`."""
    name, wrapped, cut = _parts(target, squashed=squashed)
    if not name:
        return "*"
    return made_of(name, rf"{_before(wrapped=wrapped, cut=cut)}{re.escape(name)}(?:\..*)?")


def _parts(target: str, *, squashed: bool) -> tuple[str, bool, bool]:
    """Return the name, and whether levels of wrappers and the beginning of the name may stand before it."""
    name = plain_name(_CHUNK.sub("", target, count=1) if _CHUNK.match(target) else target)
    inner = _WRAPPER.sub("", name, count=1) if _WRAPPER.match(name) else name
    return inner, inner != name, squashed and _TAIL.match(inner) is not None


def _before(*, wrapped: bool, cut: bool) -> str:
    if cut:
        return r"(?:.*\.)?"
    return r"(?:module\.)*" if wrapped else ""
