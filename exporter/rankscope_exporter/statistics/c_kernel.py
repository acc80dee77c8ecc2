"""The compiled kernel for CPUs. `kernel.c` is compiled when the package is built, and loaded here with ctypes."""

from __future__ import annotations

import array
import ctypes
import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

log = logging.getLogger("rankscope_exporter.statistics")

SOURCE: Final = Path(__file__).with_name("kernel.c")
LIBRARY: Final = Path(__file__).with_name("_kernel.so")


class CKernel:
    """Raises OSError if the library cannot be loaded."""

    def __init__(self, library: Path) -> None:
        if not library.is_file():
            raise OSError("there was no C compiler when Rankscope was built")
        if hashlib.sha256(SOURCE.read_bytes()).hexdigest().encode() not in library.read_bytes():
            raise OSError("it was compiled from another source: install Rankscope again")
        self._library = ctypes.CDLL(str(library))
        self.measure: Callable[[int], None] = _function(self._library)
        """Measures the tensors of a request, given its address: see `kernel.c`."""
        self.measure_locked: Callable[[int], None] = _function(ctypes.PyDLL(str(library)))
        """The same without a release of the interpreter lock, for which another thread may let it wait for 5 ms."""

    @functools.cache  # noqa: B019 - there is one kernel
    def extra_sums(self, names: tuple[str, ...]) -> array.array[int] | None:
        """Return the addresses of the functions that compute the sums `names`; None if one of them is missing."""
        if not all(hasattr(self._library, name) for name in names):
            return None
        functions = [ctypes.cast(getattr(self._library, name), ctypes.c_void_p) for name in names]
        return array.array("q", [function.value or 0 for function in functions])


def _function(library: Any) -> Callable[[int], None]:
    found = library.rankscope_measure
    found.argtypes, found.restype = [ctypes.c_void_p], None
    return found  # type: ignore[no-any-return]  # ctypes leaves it untyped


@functools.cache
def c_kernel() -> CKernel | None:
    """Return the kernel; None, with a warning at the first call, if it cannot be used."""
    try:
        return CKernel(LIBRARY)
    except OSError as error:
        log.warning("the C kernel cannot be used (%s): tensor statistics are computed with torch operations", error)
        return None
