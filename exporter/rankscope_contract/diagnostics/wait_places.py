"""Detect from the stack of the training thread whether a rank waits for other ranks.

A Python stack shows the current call of a thread. It does not show the event for which C code in this call waits. The
result is certain only if the innermost call identifies it. If no call identifies it, the result is `Place.UNKNOWN`,
which is no evidence. The functions have no side effects.
"""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from rankscope_contract.diagnostics.rank_groups import is_library, is_standard_library
from rankscope_contract.diagnostics.stacks import Frame, StackDump, ThreadStack


class Place(enum.Enum):
    """Result of the check whether the training thread of a rank waits for other ranks."""

    IN_COLLECTIVE = "in a collective"  # certain: the innermost call is a function of torch.distributed
    MAY_WAIT = "in a call that may wait for other ranks"  # backward pass, .wait() of a torch.distributed Work
    OUTSIDE = "outside of any collective"  # certain: sleeps, reads, loads data or executes Python code
    UNKNOWN = "unknown"


_COLLECTIVE_FILES: Final = (
    ("torch", "distributed", "distributed_c10d.py"),
    ("torch", "distributed", "_functional_collectives.py"),
)
_COLLECTIVE_NAMES: Final = re.compile(
    r"reduce|gather|scatter|broadcast|all_to_all|barrier|send|recv|wait|new_group|split_group|process_group"
)

_BACKWARD: Final = frozenset({"_engine_run_backward", "backward", "grad"})

_WAITING_METHOD: Final = ".wait"
"""Name of the method of torch.distributed's Work object that waits for other ranks.

Methods such as `.item` wait for the device only.
"""

_SYSTEM_CALLS: Final = frozenset({"sleep", "read", "readinto", "readline", "write", "select", "poll", "accept"})
"""Names of methods that block only in the operating system, such as `read`.

A training thread in such a method is not in a collective.
"""

_DISPATCHING: Final = frozenset(
    {"builtins", "operator", "_operator", "math", "functools", "_functools", "itertools", "copy", "pickle", "_pickle"}
    | {"ctypes", "_ctypes", "statistics"}
)
"""Standard-library modules whose functions call methods of their arguments.

Such a function is no proof that a rank does not wait: `float(loss)` waits for the device.
"""


def place_of(dump: StackDump | None) -> Place:
    """Return whether the training thread waits for other ranks, according to `dump`, the stacks of its process.

    The result is UNKNOWN if `dump` is None or contains no frame of the training thread.
    """
    thread = None if dump is None else dump.training_thread
    if dump is None or thread is None or not thread.frames:
        return Place.UNKNOWN
    if _is_collective(thread.frames[0]):
        return Place.IN_COLLECTIVE
    place = _place(thread)
    if place is Place.OUTSIDE and any(_waits_for_ranks(other) for other in dump.threads if not other.is_training):
        return Place.UNKNOWN  # the training thread may wait for this other thread, which may wait for other ranks
    return place


def _place(thread: ThreadStack) -> Place:
    top, libraries = thread.frames[0], _innermost_libraries(thread.frames)
    if any(_has_parts(frame, "torch", "distributed") for frame in libraries):
        # Writing a checkpoint waits for a disk. Nearly all other calls of torch.distributed wait for a rank.
        return Place.UNKNOWN if _has_parts(top, "checkpoint") or is_standard_library(top.file) else Place.MAY_WAIT
    is_backward = _has_parts(top, "torch", "autograd") and top.function in _BACKWARD
    if is_backward or _has_parts(top, "torch", "nn", "parallel"):  # DDP broadcasts buffers and rebuilds buckets here
        return Place.MAY_WAIT
    if any(_has_parts(frame, "torch", "utils", "data") for frame in thread.frames):
        return Place.OUTSIDE
    if thread.calls is not None and (place := _place_of_call(thread.calls)) is not Place.UNKNOWN:
        return place
    is_plain = is_standard_library(top.file) and PurePath(top.file).stem not in _DISPATCHING
    return Place.OUTSIDE if is_plain else Place.UNKNOWN


def _place_of_call(calls: str) -> Place:
    if not calls:
        return Place.OUTSIDE
    path, _, name = calls.rpartition(".")
    module = path.partition(".")[0]
    if module:
        is_plain = module in sys.stdlib_module_names and module not in _DISPATCHING
        return Place.OUTSIDE if is_plain else Place.UNKNOWN
    if calls == _WAITING_METHOD:
        return Place.MAY_WAIT
    return Place.OUTSIDE if name in _SYSTEM_CALLS else Place.UNKNOWN


def _waits_for_ranks(thread: ThreadStack) -> bool:
    return not thread.is_ours and any(
        _has_parts(frame, "torch", "distributed") for frame in _innermost_libraries(thread.frames)
    )


def _innermost_libraries(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Return the library frames at the inner end of `frames`, up to the innermost frame of the training code.

    If no frame is of the training code, return all frames.
    """
    own = next((place for place, frame in enumerate(frames) if not is_library(frame.file)), len(frames))
    return frames[:own]


def _is_collective(frame: Frame) -> bool:
    is_there = any(PurePath(frame.file).parts[-3:] == parts for parts in _COLLECTIVE_FILES)
    return is_there and _COLLECTIVE_NAMES.search(frame.function) is not None


def _has_parts(frame: Frame, *parts: str) -> bool:
    found = PurePath(frame.file).parts
    return any(found[start : start + len(parts)] == parts for start in range(len(found)))
