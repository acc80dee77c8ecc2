"""Protection of CUDA graph captures of the training.

A capture records the work that a thread queues to a stream. Two kinds of calls of the monitor would break it:

- Work that the monitor queues to the captured stream. It would become part of the graph, and each replay would write to
  memory of the monitor that was freed. Hooks therefore do nothing while their stream is captured (`adapters.tracing`).
- Queries of the device on another thread, such as the thread that publishes records. The device's runtime refuses them
  during a capture and invalidates the capture, unless the thread is in the relaxed capture mode (`others_may_capture`).

A query also creates a context of about 500 MB on the current device of the thread, if the process has none there. A new
thread has device 0 as its current device, whichever device the training uses. `others_may_capture` therefore selects a
device that the process uses already.
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
    """Return whether the current stream of this thread is captured."""
    return _cuda.is_initialized() and _cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def others_may_capture() -> Iterator[bool]:
    """Permit this thread to query the device without invalidating a graph capture of another thread.

    The current device of this thread is one that the process uses already. The value is False if the runtime of the
    device has no mode for this.
    """
    device = device_in_use()
    if device is None:
        yield True
        return
    with _cuda.device(device):
        mode = ctypes.c_int(_RELAXED)
        exchange = exchange_of_modes()
        is_relaxed = exchange is not None and exchange(ctypes.byref(mode)) == 0
        try:
            yield is_relaxed
        finally:
            if is_relaxed:
                exchange(ctypes.byref(mode))


def device_in_use() -> int | None:
    """Return the number of a CUDA device on which this process has a context; None if there is none.

    The result is the current device of this thread, if it has a context. The function creates no context.
    """
    if not _cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped in torch
        return None
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", lambda _device: True)  # noqa: SLF001 - no public name
    devices = (_cuda.current_device(), *range(_cuda.device_count()))
    return next((device for device in devices if has_context(device)), None)


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
