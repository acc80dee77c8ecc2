"""The compiled kernel for CPUs. `kernel.c` is compiled when the package is built, and loaded here with ctypes."""

from __future__ import annotations

import array
import ctypes
import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

log = logging.getLogger("rankscope_exporter.measure.kernels")

SOURCE: Final = Path(__file__).with_name("kernel.c")
LIBRARY: Final = Path(__file__).with_name("_kernel.so")

_DLPACK_MAJOR: Final = 1  # the version of its structs in `kernel.c`


class Read:
    """The bits of a result of `CKernel.read`, as in `kernel.c`."""

    MOVED, RESHAPED, ABSENT, UNREAD, LARGE = 1, 2, 4, 8, 16


CODES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""Numbers of the dtypes that the compiled kernels can read."""


class CKernel:
    """Raises OSError if the library cannot be loaded."""

    def __init__(self, library: Path) -> None:
        if not library.is_file():
            raise OSError("there was no C compiler when Rankscope was built")
        if hashlib.sha256(SOURCE.read_bytes()).hexdigest().encode() not in library.read_bytes():
            raise OSError("it was compiled from another source: install Rankscope again")
        self._library, locked = ctypes.CDLL(str(library)), ctypes.PyDLL(str(library))
        self.read: Callable[[int, Sequence[torch.Tensor | None]], int] = _function(
            locked.rankscope_read, ctypes.c_int64, ctypes.c_void_p, ctypes.py_object
        )
        """Reads addresses, sizes and dtypes of tensors into a request, and measures them if possible: see `kernel.c`.

        Returns 0 if nothing remains to be done.
        """
        self.measure: Callable[[int], None] = _function(self._library.rankscope_measure, None, ctypes.c_void_p)
        """Measures the tensors of a request, given its address, or adds up the products of the signs of its pairs."""
        self.measure_locked: Callable[[int], None] = _function(locked.rankscope_measure, None, ctypes.c_void_p)
        """The same without a release of the interpreter lock, for which another thread may let it wait for 5 ms."""
        self.python = _python_functions()

    @functools.cache  # noqa: B019 - there is one kernel
    def extra_sums(self, names: tuple[str, ...]) -> array.array[int] | None:
        """Return the addresses of the functions that compute the sums `names`; None if one of them is missing."""
        if not all(hasattr(self._library, name) for name in names):
            return None
        functions = [ctypes.cast(getattr(self._library, name), ctypes.c_void_p) for name in names]
        return array.array("q", [function.value or 0 for function in functions])


def _function(found: Any, result: Any, *arguments: Any) -> Any:
    found.argtypes, found.restype = arguments, result
    return found


def _python_functions() -> array.array[int]:
    """Return the struct `Python` of `kernel.c`."""
    python = ctypes.PyDLL(None)
    names = ("PySequence_GetItem", "PyObject_Type", "Py_DecRef", "PyErr_Clear")
    functions = [ctypes.cast(getattr(python, name), ctypes.c_void_p).value or 0 for name in names]
    return array.array("q", (_describe(python), *functions, *map(id, (None, torch.Tensor, torch.nn.Parameter))))


def _describe(python: Any) -> int:
    """Return the address of the function of DLPack that describes a tensor; 0 before torch 2.10, which lacks it."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return 0
    pointer = _function(python.PyCapsule_GetPointer, ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    interface = (ctypes.c_uint64 * 6).from_address(pointer(capsule, b"dlpack_exchange_api"))
    return interface[5] if interface[0] & 0xFFFFFFFF == _DLPACK_MAJOR else 0


@functools.cache
def c_kernel() -> CKernel | None:
    """Return the kernel; None, with a warning at the first call, if it cannot be used."""
    try:
        return CKernel(LIBRARY)
    except OSError as error:
        log.warning("the C kernel cannot be used (%s): tensor statistics are computed with torch operations", error)
        return None
