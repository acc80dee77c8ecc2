"""The context in which the hooks of the monitor run. Quantities and adapters register their hooks through it.

Hooks do nothing after detach and in a forked child process. Errors in hooks are caught, and their CPU time is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.parameter_hooks import Removable
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.base.tracing import (
    Entry,
    call_untraced,
    call_untransformed,
    is_dynamo_compiling,
    is_traced,
    is_transformed,
    on_compilation,
    uncompiled,
)
from rankscope_exporter.quantities.base import Hook, SamplingGate
from rankscope_exporter.training.cpu_time import HookClock
from rankscope_exporter.training.recorder import Recorder


class GatedHook(Entry):
    """A hook that torch calls at every step.

    It calls its function only while its gate is open. The gate belongs to a quantity, and is open at the steps at which
    this quantity is measured.
    """

    def __init__(
        self, call: Callable[..., None], boundary: ErrorBoundary, gate: SamplingGate, in_forward: Callable[[], bool]
    ) -> None:
        super().__init__(call, boundary, on_compilation(self._compiles))
        self._gate = gate
        self._in_forward = in_forward
        self.was_called = False
        self.is_compiled = False
        self.on_inactive_call: Callable[[], None] = lambda: None

    @uncompiled
    def __call__(self, *args: Any) -> None:
        """Call the function of the hook if the gate is open: if the quantity of the gate is measured at this step."""
        # The first line, see `Entry`. Otherwise the graph would be compiled again when the gate opens or closes.
        if is_dynamo_compiling():
            if self._was_compiled is not None:
                self._was_compiled()
            return
        self._boundary.call("a hook", self._called, *args)

    def _called(self, *args: Any) -> None:
        self.was_called = True
        if self._gate.is_open:
            if is_transformed() and self._in_forward() and not is_traced():
                self._call(*args)  # a part of a training forward pass: the quantity reports transformed tensors
            else:
                call_untransformed(self._call, *args)
        else:
            self.on_inactive_call()

    def _compiles(self) -> None:
        self.is_compiled = True


class HookContext:
    """Calls functions of the monitor from hooks, and keeps the handles of all hooks until detach.

    If `active` is false, no hook has an effect. This is the case after detach and in a forked child process.
    """

    def __init__(
        self,
        monitored: MonitoredModel,
        recorder: Recorder,
        boundary: ErrorBoundary,
        *,
        clock: HookClock,
        lock: contextlib.AbstractContextManager[Any],
        tell: Callable[[str], None],
    ) -> None:
        self.active = True
        self.clock = clock
        self.tell = tell
        """Function that publishes a notice on the console and as an event."""
        self.in_forward = False
        """True if a training forward pass of the whole model is running."""
        self.grad_enabled = True
        """True if gradients were enabled when the training called the hook that is running now."""
        self._monitored = monitored
        self._recorder = recorder
        self._boundary = boundary
        self._lock = lock
        self._handles: list[Removable] = []
        self._published: set[str] = set()

    @property
    def micro_step(self) -> int:
        """The number of the latest training forward pass within the step, from 0 on.

        Each model chunk has its own count.
        """
        return max(0, self._recorder.micro_step)

    def keep(self, handle: Removable) -> None:
        """Store `handle`, the handle of a hook that must be removed at detach."""
        self._handles.append(handle)

    def remove(self) -> None:
        """Remove all hooks. A hook that cannot be removed is reported, and has no effect any more."""
        self.active = False
        for handle in self._handles:
            self._boundary.call("removing a hook", handle.remove)
        self._handles.clear()

    def begins_steps(self, module: torch.nn.Module) -> bool:
        """Return whether a step of the training begins with the forward pass of `module`."""
        return any(module is chunk for chunk in self._monitored.framework.chunks)

    def guarded(self, where: str, function: Callable[..., None], gate: SamplingGate) -> Hook:
        """Return a hook that calls `function` only at steps at which the quantity of `gate` is measured.

        The function runs without gradients, its errors are caught, and its CPU time is measured. `where` names the
        operation in error messages.
        """

        def call(*args: Any) -> None:
            if self.active:
                self.grad_enabled = torch.is_grad_enabled()
                with torch.no_grad():
                    self.clock.timed_reading(where, function, *args)

        return GatedHook(call, self._boundary, gate, lambda: self.in_forward)

    def always(self, where: str, function: Callable[..., None]) -> Callable[..., None]:
        """Return a hook that calls `function` at every step, sampled or not. Errors of the function are caught."""

        def call(*args: Any) -> None:
            if self.active:
                self._boundary.call(where, function, *args)

        return Entry(call, self._boundary)

    def call(self, where: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)` for a call of the script; None if the function raises or if a tracer is active."""
        return self._boundary.call(where, call_untraced, self.clock.timed, where, function, *args)

    def between(self, function: Callable[[], None]) -> None:
        """Call `function` under the lock of the current step, so that no step begins or ends meanwhile."""
        with self._lock:
            function()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Disable all hooks inside the `with` block.

        Used for computations of the monitor that are not part of the training.
        """
        was_active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = was_active

    def tell_once(self, sentence: str) -> None:
        """Publish a notice the first time that this method receives it. Also works while code is being compiled."""
        if sentence not in self._published:
            self._published.add(sentence)
            self._boundary.call("a note", self.tell, sentence)
