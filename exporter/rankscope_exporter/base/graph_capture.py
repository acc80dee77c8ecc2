"""Protection of CUDA graph captures of the training.

A capture records the work that a thread queues to a stream. Two kinds of calls of the monitor would break it:

- Work that the monitor queues to the captured stream. It would become part of the graph, and each replay would write to
  memory of the monitor that was freed. Hooks therefore do nothing while their stream is captured (`base.tracing`).
- Queries of the device on another thread, such as the thread that publishes records. The device's runtime refuses them
  during a capture and invalidates the capture, unless the thread is in the relaxed capture mode (`others_may_capture`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any, Final

import torch

_RELAXED: Final = 2
"""cudaStreamCaptureModeRelaxed."""

_cuda: Final = torch.cuda


def is_capturing() -> bool:
    """Return whether the current stream of this thread is captured. Takes 30 ns if the process uses no CUDA device."""
    # The private name is checked first, because the public function takes 0.2 µs.
    return _cuda._initialized and _cuda.is_initialized() and _cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]  # noqa: SLF001


@contextlib.contextmanager
def others_may_capture() -> Iterator[bool]:
    """Permit this thread to query the device without invalidating a graph capture of another thread.

    The value is False if the runtime of the device has no mode for this.
    """
    if not _cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped in torch
        yield True
        return
    mode = ctypes.c_int(_RELAXED)
    exchange = exchange_of_modes()
    is_relaxed = exchange is not None and exchange(ctypes.byref(mode)) == 0
    try:
        yield is_relaxed
    finally:
        if is_relaxed:
            exchange(ctypes.byref(mode))


@functools.cache
def exchange_of_modes() -> Any:
    """Return the runtime's function that exchanges the capture mode of the calling thread; None if it is missing."""
    library, prefix = f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}", "cuda"
    if getattr(torch.version, "hip", None):
        library, prefix = "libamdhip64.so", "hip"
    try:
        return getattr(ctypes.CDLL(library), f"{prefix}ThreadExchangeStreamCaptureMode")
    except (OSError, AttributeError):
        return None
