"""Decides whether code of the monitor may run. It must not run while a compiler or tracer records the training.

Every function of the monitor that torch calls is a `Hook` (`adapters.hook_context`), and calls of the script go through
`HookContext.call`. There are five cases:

- No mode, transform, compiler or tracer is active. The function runs. `is_plain` detects this in about 0.2 µs.
- A compiler or tracer records the code (Dynamo, `torch.jit.trace`, `torch.fx`, `make_fx`, AOTAutograd, export, a fake
  tensor mode). The function does nothing: its operations would become part of the user's graph, and no training step
  runs.
- A transform of `torch.func` runs (grad, vmap, jvp, functionalize, and all that consist of these). A hook does nothing:
  each operation would be transformed, and the forward pass is no training forward pass. A call of the script, such as
  `Monitor.log`, runs outside of all transforms.
- The current CUDA stream is captured into a graph. The function does nothing, as for a tracer: its operations would
  become part of the user's graph, and each replay would write to memory of the monitor that was freed.
- Another dispatch or function mode is active (FlopCounterMode, selective activation checkpointing, CommDebugMode,
  `torch.set_default_device`, a mode of the user). The function runs with all modes switched off, so that no mode
  records an operation of the monitor.

If code that Dynamo compiles calls a hook, Dynamo compiles the hook as part of this code. The first line of each hook
returns if Dynamo is compiling. Dynamo evaluates this condition at compile time, so the rest of the hook is not
compiled. The hook therefore does not run in the compiled code and adds no graph break. Optimizer steps in compiled code
are detected by changes in the state of the optimizer instead. This detection starts when `on_compilation` reports that
Dynamo compiles a hook of an optimizer.

If C++ code such as the autograd engine calls a hook during a compiled function, Dynamo would compile the hook on its
own. The decorator `uncompiled` prevents this, and the hook runs.

Queries of the device on another thread, such as the thread that publishes records, would also break the capture of a
CUDA graph. The device's runtime refuses them during a capture and invalidates the capture, unless the thread is in the
relaxed capture mode (`others_may_capture`).

A query also creates a context of about 500 MB on the current device of the thread, if the process has none there. A new
thread has device 0 as its current device, whichever device the training uses. `others_may_capture` therefore selects a
device that the process uses already.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch

from rankscope_exporter.adapters import torch_private

_is_compiling: Final = torch.compiler.is_compiling
_cuda: Final = torch.cuda

F = TypeVar("F", bound=Callable[..., Any])

is_dynamo_compiling: Final = torch.compiler.is_dynamo_compiling
"""Function that Dynamo evaluates to a constant: True in a frame that Dynamo compiles, False in a frame that runs."""

STAND_INS: Final = frozenset({"FakeTensor", "FunctionalTensor", "Proxy"})
"""Names of classes whose objects tracers pass instead of tensors. They have a shape and no numbers.

The classes are compared by name, because an import of the classes would load the compiler.
"""


def is_plain() -> bool:
    """Return whether this thread has no active mode, transform, compiler, tracer or graph capture.

    Takes about 0.2 µs.
    """
    return not (
        torch_private.dispatch_modes()
        or torch_private.current_transform() is not None
        or torch_private.function_modes()
        or torch_private.fx_traces()
        or _is_compiling()
        or torch_private.jit_state() is not None
        or (torch_private.is_cuda_initialized() and is_capturing())
    )


def is_traced() -> bool:
    """Return whether a compiler, a tracer or the capture of a CUDA graph records the operations of this thread.

    Call it only if `is_plain` returned False.
    """
    if torch_private.fx_traces() or _is_compiling() or torch_private.jit_state() is not None:
        return True
    if torch_private.pre_dispatch_modes() or is_capturing():
        return True
    return bool(torch_private.dispatch_modes()) and any(
        torch_private.infra_mode(key) is not None for key in torch_private.INFRA_KEYS
    )


def is_transformed() -> bool:
    """Return whether a transform of `torch.func`, or forward-mode differentiation, runs on this thread."""
    return torch_private.current_transform() is not None or torch_private.forward_mode_level() >= 0


def untransformed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside of the wrappers that transforms of `torch.func` put around `tensor`."""
    while torch_private.is_wrapped(tensor):
        tensor = torch_private.unwrapped_tensor(tensor)
    return tensor


def call_outside_of_modes(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)` with all modes and transforms of this thread disabled, and return the result."""
    can_stack = torch_private.pop_function_mode is not None and torch_private.push_function_mode is not None
    functions = [torch_private.pop_function_mode() for _ in range((can_stack and torch_private.function_modes()) or 0)]
    try:
        with contextlib.ExitStack() as stack:
            if torch_private.dispatch_modes():
                stack.enter_context(torch_private.without_modes())  # torch's own way to do it
            if torch_private.current_transform() is not None:
                stack.enter_context(torch_private.without_transforms())
            return function(*args)
    finally:
        for mode in reversed(functions):
            torch_private.push_function_mode(mode)


def uncompiled(function: F) -> F:
    """Mark `function` so that Dynamo compiles neither its frame nor the frames of functions that it calls.

    Return `function`.

    Dynamo may still inline the function into a frame that it compiles. The first line of the function must therefore
    call `is_dynamo_compiling`.
    """
    torch_private.skip_frames(function.__code__)
    return function


def on_compilation(listener: Callable[[], object]) -> Callable[[], int]:
    """Return a function that a hook must call in its first line. The function notifies `listener` of compilations.

    When Dynamo compiles the hook, it calls the returned function, which calls `listener` without arguments. The call
    happens before the compiled code runs for the first time, and once for each compilation.
    """

    def was_compiled() -> int:
        call_outside_of_modes(listener)
        return 0

    torch_private.mark_constant(was_compiled)
    return was_compiled


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
        mode = ctypes.c_int(2)  # cudaStreamCaptureModeRelaxed
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
    devices = (_cuda.current_device(), *range(_cuda.device_count()))
    return next((device for device in devices if torch_private.has_primary_context(device)), None)


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
