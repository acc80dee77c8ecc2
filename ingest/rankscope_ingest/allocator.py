"""One allocator, and one heap of it, for all of a process that serves: said before there is a second of either.

Arrow looks which allocator to take when it is loaded. By itself it takes one of its own, also where it was told of a
pool: to encode columns, and to compute. What that one holds free is of no use to others, and goes back to the system
when it likes: of a service with a thousand ranks 50 to 200 MB. And glibc never gives up a heap that it has begun for a
thread, as libraries start them when they are loaded: those heaps are of 64 MB, so that columns of 20 MB leave holes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Final

_ARENA_MAX: Final = -8  # of glibc's mallopt


def share_allocator() -> None:
    """Have all threads and Arrow share one heap, unless the user has chosen another allocator for Arrow.

    To be called before anything is imported that starts threads; harmless where another library allocates.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    if (mallopt := of_glibc("mallopt")) is not None:
        mallopt(_ARENA_MAX, 1)


def of_glibc(name: str) -> Callable[..., int] | None:
    """Return the function of that name of the process' own library, None where it has none."""
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):  # not glibc
        return None
    return function
