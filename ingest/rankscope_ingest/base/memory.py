"""Allocator and garbage collector settings of a service process.

Each flush (a write of collected rows to the store) allocates some hundred megabytes and frees them. The kernel clears
each memory page that it allocates to the process again. Without the settings of this module, the clearing took half of
the time of decoding poll responses and a sixth of the service's CPU time. Therefore the process keeps free memory, up
to a limit. One heap serves all threads, because memory that one thread frees in a heap is not available to threads with
other heaps. `share_allocator` must be called before threads are started and before Arrow is imported.

The limit applies only to free memory at the end of the heap. Free memory between used blocks grows for hours as the
heap fragments. The service returns this memory to the system every ten minutes, and after each maintenance task that
used much memory; this costs the next flush 80 ms of CPU time. The garbage collector skips the hundred thousand objects
that Python creates when it imports the modules of the service.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

KEPT_BYTES: Final = 256 << 20
"""Maximum free memory in bytes at the end of the heap. The allocator returns memory above this limit to the system."""

TRIM_SECONDS: Final = 600.0
MUCH_BYTES: Final = 32 << 20
"""Growth of the memory of the process, in bytes, from which a maintenance task of the store counts as large.

After a large task, the service returns free memory to the system. A compaction exceeds this growth; a check whether
maintenance is due never does.
"""

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # options of glibc's mallopt
_MALLOC_OPTIONS: Final = (
    (_MMAP_THRESHOLD, 32 << 20),  # glibc's maximum; larger blocks come from the system and return to it
    (_TRIM_THRESHOLD, KEPT_BYTES),
    (_TOP_PAD, 16 << 20),
)
_YOUNG_OBJECTS: Final = 20_000


def tune_allocator() -> None:
    """Configure the allocator and the garbage collector of this process.

    The allocator is not changed if it is not that of glibc.
    """
    share_allocator()
    import pyarrow as pa  # noqa: PLC0415 - share_allocator must run before Arrow is loaded

    pa.set_memory_pool(pa.system_memory_pool())
    if (mallopt := of_glibc("mallopt")) is not None:
        for option, value in _MALLOC_OPTIONS:
            mallopt(option, value)
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])


def unfreeze_gc() -> None:
    """Undo `gc.freeze`: make the garbage collector examine all objects again.

    Some libraries search for leaked objects when a process exits and need these objects.
    """
    gc.unfreeze()


def trim() -> None:
    """Return free memory to the system, except `KEPT_BYTES` at the end of the heap.

    Without glibc, the function has no effect.
    """
    if (malloc_trim := of_glibc("malloc_trim")) is not None:
        malloc_trim(ctypes.c_size_t(KEPT_BYTES))


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, or 0 on a system without /proc.

    On a system without /proc, no growth of the memory is measured. The service then does not return free memory to the
    system after maintenance tasks.
    """
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * mmap.PAGESIZE


def share_allocator() -> None:
    """Make all threads and Arrow use one heap, unless the user has chosen another allocator for Arrow.

    Call this function before importing any module that starts threads. It has no effect without glibc.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    if (mallopt := of_glibc("mallopt")) is not None:
        mallopt(_ARENA_MAX, 1)


def of_glibc(name: str) -> Callable[..., int] | None:
    """Return the function `name` of the C library of this process, or None if the library is not glibc."""
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):  # not glibc
        return None
    return function
