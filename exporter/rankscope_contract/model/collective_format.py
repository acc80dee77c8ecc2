"""Format collectives as text: dtype names, message sizes, lists of ranks.

Torch's flight recorder reports dtypes by their C++ names, and the sizes of inputs and outputs. The functions have no
side effects.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Final

_TYPES: Final[dict[str, tuple[str, int]]] = {
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "Half": ("float16", 2),
    "Long": ("int64", 8),
    "Int": ("int32", 4),
    "Short": ("int16", 2),
    "Char": ("int8", 1),
    "Byte": ("uint8", 1),
    "Bool": ("bool", 1),
    "ComplexHalf": ("complex32", 4),
    "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16),
}
"""Python name and bytes per element of the dtypes whose name in torch's flight recorder does not contain their bits."""

MOST_RANKS: Final = 1 << 20
"""Maximum number of ranks in the text form of a list of ranks. A text with more ranks is rejected as invalid."""

_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")

Sizes = Sequence[Sequence[int]]


def _type(name: str) -> tuple[str, int]:
    """Return the Python name of a dtype, and its bytes per element, which are 0 if they are unknown."""
    bits = re.search(r"\d{1,3}", name)
    return _TYPES.get(name) or (name.lower(), int(bits[0]) // 8 if bits else 0)


def dtype_text(names: Iterable[str]) -> str | None:
    """Return the Python names of dtypes, each name once, separated by commas; None for an empty list."""
    known = dict.fromkeys(_type(name)[0] for name in names)
    return ", ".join(known) or None


def message_bytes(inputs: Sizes, input_types: Sequence[str], outputs: Sizes, output_types: Sequence[str]) -> int | None:
    """Return the bytes of the input or output, the larger, equal on all ranks; None without tensors or known dtype."""
    sent, received = _bytes(inputs, input_types), _bytes(outputs, output_types)
    if (sent is None and inputs) or (received is None and outputs):
        return None
    return None if sent is None and received is None else max(sent or 0, received or 0)


def bytes_text(count: int) -> str:
    """Return a number of bytes as text for display, such as `4.0 MiB`."""
    power = min(len(_BYTE_UNITS) - 1, max(0, count.bit_length() - 1) // 10)
    return f"{count} B" if power == 0 else f"{count / (1 << 10 * power):.1f} {_BYTE_UNITS[power]}"


def spans(ranks: Iterable[int]) -> str:
    """Return ranks as text such as `0-2,5`. The ranks may be in any order; `ranks_in` is the inverse function."""
    found: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def ranks_in(text: str) -> tuple[int, ...]:
    """Return the ranks in a text such as `0-2,5`, in ascending order.

    Raises ValueError if the text has another form or contains more than MOST_RANKS ranks.
    """
    ends = [span.partition("-") for span in text.split(",")] if text else []
    ranges = [range(int(first), int(last if dash else first) + 1) for first, dash, last in ends]
    if sum(map(len, ranges)) > MOST_RANKS:
        raise ValueError(f"more than {MOST_RANKS:,} ranks in {text[:80]!r}")
    return tuple(sorted(set(itertools.chain.from_iterable(ranges))))


def _bytes(sizes: Sizes, types: Sequence[str]) -> int | None:
    if not sizes or not types:
        return None
    total = 0
    for position, size in enumerate(sizes):
        width = _type(types[min(position, len(types) - 1)])[1]
        if width == 0:
            return None
        total += width * math.prod(size)
    return total
