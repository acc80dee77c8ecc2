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
import importlib
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, Final, TypeVar

import torch
from torch.autograd import forward_ad

from rankscope_exporter.process.errors import torch_name

_STACKED: Final = "modes of the script remain active in hooks"
_UNSEEN: Final = "hooks do not recognize that a tracer or transform runs"
_UNREAD: Final = "logged tensors of torch.func are not read"


def _none(*_: Any) -> None:
    """Replace a function that this torch lacks: no mode, tracer or transform is active."""


# None of these has a public name, except `is_compiling`.
_dispatch_modes: Final = torch_name("torch._C._len_torch_dispatch_stack", _none, _UNSEEN)
_function_modes: Final = torch_name("torch._C._len_torch_function_stack", _none, _STACKED)
_jit_state: Final = torch_name("torch._C._get_tracing_state", _none, _UNSEEN)
_transform: Final = torch_name("torch._C._functorch.peek_interpreter_stack", _none, _UNSEEN)
_infra_mode: Final = torch_name("torch._C._get_dispatch_mode", _none, _UNSEEN)
_INFRA_KEYS: Final = (
    torch_name("torch._C._TorchDispatchModeKey.PROXY", None, _UNSEEN),
    torch_name("torch._C._TorchDispatchModeKey.FAKE", None, _UNSEEN),
    torch_name("torch._C._TorchDispatchModeKey.FUNCTIONAL", None, _UNSEEN),
)
_pop_function_mode: Final = torch_name("torch._C._pop_torch_function_stack", None, _STACKED)
_push_function_mode: Final = torch_name("torch._C._push_on_torch_function_stack", None, _STACKED)
_pre_dispatch_modes: Final = torch_name("torch._ops._len_torch_dispatch_stack_pre_dispatch", _none, _UNSEEN)
_fx_traces: Final = torch_name(  # newer releases also have the earlier name, which warns there
    "torch.fx._symbolic_trace.is_fx_symbolic_tracing", _none, _UNSEEN, earlier="torch.fx._symbolic_trace.is_fx_tracing"
)
torch_name("torch.autograd.forward_ad._current_level", -1, _UNSEEN)  # a variable, which is read at each call
_without_modes: Final = torch_name(
    "torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext, _STACKED
)
_is_wrapped: Final = torch_name("torch._C._functorch.is_functorch_wrapped_tensor", _none, _UNREAD)
_unwrapped: Final = torch_name("torch._C._functorch.get_unwrapped", torch.detach, _UNREAD)
_is_compiling: Final = torch.compiler.is_compiling
_cuda: Final = torch.cuda


def _frame_skipper() -> Callable[[CodeType], object]:
    """Return the function that excludes a code object, and the functions that its frames call, from compilation.

    Before torch 2.7, the function excludes the code object only.
    """
    skip = torch_name("torch._C._dynamo.eval_frame._FrameAction.SKIP", None)
    strategy = torch_name("torch._C._dynamo.eval_frame._FrameExecStrategy", None)
    set_strategy = torch_name("torch._C._dynamo.eval_frame.set_code_exec_strategy", None)
    if None in (skip, strategy, set_strategy):
        without = "Dynamo may compile hooks that C++ code calls"
        return torch_name("torch._C._dynamo.eval_frame.skip_code", _none, without)  # type: ignore[no-any-return]
    skipped = strategy(skip, skip)
    return lambda code: set_strategy(code, skipped)


_skip_frames: Final = _frame_skipper()

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
        _dispatch_modes()
        or _transform() is not None
        or _function_modes()
        or _fx_traces()
        or _is_compiling()
        or _jit_state() is not None
        or (getattr(_cuda, "_initialized", True) and is_capturing())  # the private name first: it is ten times as fast
    )


def is_traced() -> bool:
    """Return whether a compiler, a tracer or the capture of a CUDA graph records the operations of this thread.

    Call it only if `is_plain` returned False.
    """
    if _fx_traces() or _is_compiling() or _jit_state() is not None:
        return True
    if _pre_dispatch_modes() or is_capturing():
        return True
    return bool(_dispatch_modes()) and any(_infra_mode(key) is not None for key in _INFRA_KEYS)


def has_transform() -> bool:
    """Return whether a transform of `torch.func` runs on this thread."""
    return _transform() is not None


def is_transformed() -> bool:
    """Return whether a transform of `torch.func`, or forward-mode differentiation, runs on this thread."""
    return _transform() is not None or getattr(forward_ad, "_current_level", -1) >= 0


def untransformed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside of the wrappers that transforms of `torch.func` put around `tensor`."""
    while _is_wrapped(tensor):
        tensor = _unwrapped(tensor)
    return tensor


def call_outside_of_modes(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)` with all modes and transforms of this thread disabled, and return the result."""
    can_stack = _pop_function_mode is not None and _push_function_mode is not None
    functions = [_pop_function_mode() for _ in range((can_stack and _function_modes()) or 0)]
    try:
        with contextlib.ExitStack() as stack:
            if _dispatch_modes():
                stack.enter_context(_without_modes())  # torch's own way to do it
            if _transform() is not None:
                pyfunctorch = importlib.import_module("torch._functorch.pyfunctorch")  # a transform has loaded it
                stack.enter_context(pyfunctorch.temporarily_clear_interpreter_stack())
            return function(*args)
    finally:
        for mode in reversed(functions):
            _push_function_mode(mode)


def uncompiled(function: F) -> F:
    """Mark `function` so that Dynamo compiles neither its frame nor the frames of functions that it calls.

    Return `function`.

    Dynamo may still inline the function into a frame that it compiles. The first line of the function must therefore
    call `is_dynamo_compiling`.
    """
    _skip_frames(function.__code__)
    return function


def on_compilation(listener: Callable[[], object]) -> Callable[[], int]:
    """Return a function that a hook must call in its first line. The function notifies `listener` of compilations.

    When Dynamo compiles the hook, it calls the returned function, which calls `listener` without arguments. The call
    happens before the compiled code runs for the first time, and once for each compilation.
    """

    def was_compiled() -> int:
        call_outside_of_modes(listener)
        return 0

    # The mark of `torch.compiler.assume_constant_result`, which itself would load the compiler: Dynamo calls the
    # function while it compiles, and takes its result for a constant.
    was_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - see above
    return was_compiled


_RELAXED: Final = 2
"""cudaStreamCaptureModeRelaxed."""


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
