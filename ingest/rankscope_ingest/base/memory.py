"""How the process of a service holds memory: what it gave back each time it would ask for again at the next flush.

A flush takes some hundred megabytes of columns and lets them go. The kernel clears every page that it hands out anew:
half of the time in which bodies become rows went into that, and a sixth of the time of all of it. So free memory is
kept, up to a limit, and one heap serves all threads, since what one thread has freed is of use to no other otherwise.
It is one only where `share_allocator` came before what starts threads, and Arrow is in it where it came before Arrow.
That limit is of the end of the heap alone. What is free between pieces in use grows for hours, as these come to lie
further and further apart: it goes back every ten minutes, and after each piece of upkeep that took much. That costs the
next flush 80 ms of CPU. And the collector of cycles need not look again and again at a hundred thousand objects that
imports made.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

KEPT_BYTES: Final = 256 << 20
"""Free memory at the end of the heap that is kept; what is above it goes back to the system."""

TRIM_SECONDS: Final = 600.0
MUCH_BYTES: Final = 32 << 20
"""What a look at the store never takes, and a merge of its files does."""

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of glibc's mallopt
_MAPPED_BYTES: Final = 32 << 20  # the most that glibc takes: larger pieces come from the system, and go back there
_GROWTH_BYTES: Final = 16 << 20
_YOUNG_OBJECTS: Final = 20_000


def tune_allocator() -> None:
    """Set this up, once, for the process; harmless where another library allocates."""
    share_allocator()
    import pyarrow as pa  # noqa: PLC0415 - share_allocator must run before Arrow is loaded

    pa.set_memory_pool(pa.system_memory_pool())
    _keep_free_pages()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])


def unfreeze_gc() -> None:
    """Have what was spared collected again: libraries look at the end of the process for what nobody has freed."""
    gc.unfreeze()


async def trim_periodically() -> None:
    """Now and then give free memory back to the system that lies before the end of the heap. Never ends."""
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        await asyncio.to_thread(trim)


def trim() -> None:
    """Give back what is free, save `KEPT_BYTES` at the end of the heap; nothing where another library allocates."""
    if (malloc_trim := of_glibc("malloc_trim")) is not None:
        malloc_trim(ctypes.c_size_t(KEPT_BYTES))


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the system does not say, and nothing can be given back."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * mmap.PAGESIZE


def _keep_free_pages() -> None:
    if (mallopt := of_glibc("mallopt")) is None:
        return
    for option, value in (
        (_MMAP_THRESHOLD, _MAPPED_BYTES),
        (_TRIM_THRESHOLD, KEPT_BYTES),
        (_TOP_PAD, _GROWTH_BYTES),
    ):
        mallopt(option, value)


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
