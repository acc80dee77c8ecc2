"""The OpenMP threads with which torch computes on a CPU: the team of each thread, and its size.

torch divides a CPU operation among an OpenMP team, and each thread that runs such an operation has a separate team.
With a second team, the process has more OpenMP threads than cores. libgomp then lets the workers of every team sleep
between two operations, including those of the training thread. Each operation of training has to wake the workers up,
and a step takes up to 1.6 times as long.

Threads of the monitor therefore compute with numpy. torch may still compute on these threads: in functions of torch
that are called for another purpose, and in code of the user such as `on_anomaly`. `limit_this_thread` limits torch to
one CPU thread, only on the thread itself. `torch.set_num_threads` is not used for this, because it sets the default of
every thread that the process starts later.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from pathlib import Path
from typing import Any, Final

import torch

_OPENMP: Final = "ATen parallel backend: OpenMP"
_PROCESS: Final = os.getpid()


def limit_this_thread() -> None:
    """Limit torch to one CPU thread, only on the calling thread."""
    # torch sets the number of OpenMP threads of a new thread at its first operation that may be divided. This call
    # causes that now, so that torch does not replace the number that is set below.
    for library in _libraries() if torch.get_num_threads() > 1 else ():
        library.omp_set_num_threads(1)
        if torch.get_num_threads() == 1:
            break
    # After a call of torch.set_num_threads(), torch sets the number of MKL threads separately on each thread. This
    # number takes precedence over the number of OpenMP threads.
    if library := next((one for one in _libraries() if hasattr(one, "MKL_Set_Num_Threads_Local")), None):
        library.MKL_Set_Num_Threads_Local(1)


def intra_op_threads() -> tuple[int, ...]:
    """Return the native ids of the other threads of the calling thread's OpenMP team; missing ones are started."""
    found: list[int] = []
    region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    report = region(lambda _: found.append(threading.get_native_id()))
    if torch.get_num_threads() > 1 and (address := _gomp_parallel()):
        parallel = ctypes.CFUNCTYPE(None, region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(address)
        parallel(report, None, 0, 0)  # 0: as many threads as torch uses
    return tuple(sorted({*found} - {threading.get_native_id()}))


@functools.cache
def openmp_parallel() -> int:
    """Return the address of `GOMP_parallel`, which runs a function on torch's OpenMP team; 0 without a team."""
    # The threads of a team are not forked, and a call in a child would wait for them.
    return _gomp_parallel() if os.getpid() == _PROCESS else 0


os.register_at_fork(after_in_child=openmp_parallel.cache_clear)


@functools.cache
def _gomp_parallel() -> int:
    if _OPENMP not in torch.__config__.parallel_info():
        return 0
    for library in reversed(_libraries()):  # torch uses a preloaded OpenMP library instead of its own
        if hasattr(library, "GOMP_parallel"):  # libgomp, libomp and libiomp5 have it
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    return 0


@functools.cache
def _libraries() -> tuple[Any, ...]:
    """Return the loaded libraries that may contain the OpenMP functions of torch.

    The first is the library of torch itself; preloaded libraries follow in the result.

    A library handle also finds symbols of linked libraries, so the name of the OpenMP library (libgomp, libomp,
    libiomp5) does not matter.
    """
    maps = []
    with contextlib.suppress(OSError):  # a container may hide it
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    of_torch = {line.split(maxsplit=5)[-1] for line in maps if line.endswith("libtorch_cpu.so")}
    found = []
    for path in (str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"), *sorted(of_torch), None):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:  # not loaded from there
            continue
        if hasattr(library, "omp_set_num_threads"):
            library.omp_set_num_threads.argtypes = [ctypes.c_int]
            library.omp_set_num_threads.restype = None
            found.append(library)
    return tuple(found)
