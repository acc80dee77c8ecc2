"""Threads of the monitor inside the training process, and how they are kept from slowing torch's CPU operations.

torch divides a CPU operation among an OpenMP team, and each thread that runs such an operation has a team of its own.
With a second team the process has more OpenMP threads than cores. libgomp then lets the workers of every team sleep
between two operations, also those of the training thread: each operation of training has to wake them up, and a step
takes up to 1.6 times as long.

So the threads of the monitor compute with numpy. `OwnThread` covers the unavoidable rest: torch functions that
compute something unnoticed, and code of the user such as `on_anomaly`. It limits torch to one CPU thread on itself
alone. `torch.set_num_threads` is not for this: it sets the default of every thread that the process starts later.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

_TORCH_LIBRARIES: Final = ("libtorch_cpu.so", "libtorch_cpu.dylib")


class OwnThread(threading.Thread):
    """A daemon thread of the monitor, on which torch uses one CPU thread."""

    def __init__(self, *, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)

    def run(self) -> None:
        """Limit the thread, then call the target."""
        limit_this_thread()
        super().run()


def limit_this_thread() -> bool:
    """Have torch use one CPU thread on the calling thread alone.

    Return whether it does: the OpenMP library of torch may not be found.
    """
    # torch sets the number of a new thread at the first operation there that may be divided. This call does the same
    # first, so that nothing resets the number set below.
    if torch.get_num_threads() > 1:
        for library in _libraries():
            library.omp_set_num_threads(1)
            if torch.get_num_threads() == 1:
                break
        else:
            return False
    for library in _libraries():
        # Where training has called torch.set_num_threads(), torch gives MKL a number of its own on each thread, which
        # goes before that of OpenMP.
        if (set_mkl := getattr(library, "MKL_Set_Num_Threads_Local", None)) is not None:
            set_mkl(1)
            break
    return True


@functools.cache
def _libraries() -> tuple[Any, ...]:
    """Return the libraries that resolve the OpenMP functions as torch does: its own, then the preloaded ones.

    A library finds the symbols of those that it was linked with, whatever their names are: libgomp, libomp or libiomp5.
    """
    found = []
    for path in (*_torch_libraries(), None):
        try:
            library = ctypes.CDLL(path, mode=ctypes.DEFAULT_MODE if path is None else os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:  # not loaded from there
            continue
        if hasattr(library, "omp_set_num_threads"):
            library.omp_set_num_threads.argtypes = [ctypes.c_int]
            library.omp_set_num_threads.restype = None
            found.append(library)
    return tuple(found)


def _torch_libraries() -> Iterator[str]:
    folder = Path(torch.__file__).parent / "lib"
    yield from (str(folder / name) for name in _TORCH_LIBRARIES)
    try:  # a build of torch for a distribution keeps it elsewhere
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    yield from sorted({line.split(maxsplit=5)[-1] for line in maps if line.endswith(_TORCH_LIBRARIES)})
