"""Hooks: functions of the monitor that torch calls during training, and the state that the hooks of one model share.

A hook does nothing after detach, in a forked child process, and while a compiler or tracer is active. Errors in hooks
are caught, and their CPU time is measured.

CPU time is measured on the training thread, and on torch's threads: torch divides a CPU operation among the threads of
its pool, and the CPU clock of the calling thread does not include them. Their clocks are read before and after each
measurement. If torch uses one thread, or if the tensors are on another device, no such threads exist.
"""

from __future__ import annotations

import contextlib
import time
import timeit
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch

from rankscope_exporter.adapters.parameter_hooks import Removable
from rankscope_exporter.adapters.torch_private import current_transform, without_tensor_functions
from rankscope_exporter.adapters.tracing import (
    call_outside_of_modes,
    is_dynamo_compiling,
    is_plain,
    is_traced,
    is_transformed,
    uncompiled,
)
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.process.inert import NotCopied
from rankscope_exporter.process.openmp import intra_op_threads

NO_KEYWORDS: Final[Mapping[str, Any]] = MappingProxyType({})
"""Keyword arguments of a call that torch does not pass to a hook: other code copies hooks without `with_kwargs`."""
_CLOCK_READ_SECONDS: Final = min(timeit.repeat(timer=time.thread_time, repeat=50, number=1))
"""CPU seconds that one read of the clock takes. This time is added to each interval between two reads.

About half of the first read and half of the second read are outside of the interval that the two reads measure.
"""


class IntraOpThreads:
    """The threads of torch's pool that compute parts of operations which the training thread starts."""

    seconds = 0.0
    """The CPU time that these threads have used for the monitor."""
    clocks: tuple[int, ...] = ()
    """The CPU time clocks of the threads; empty if torch computes on the training thread alone."""

    def find(self) -> None:
        """Find the threads of torch's pool. Called on the training thread, which owns the pool."""
        self.clocks = tuple(map(_clock, intra_op_threads()))

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`, and add up the CPU time that the threads use meanwhile. Calls can be nested."""
        before = self.seconds
        try:
            began = sum(map(time.clock_gettime, self.clocks))
        except OSError:  # torch has replaced the pool
            self.clocks, began = (), 0.0
        try:
            return function(*args)
        finally:
            with contextlib.suppress(OSError):
                self.seconds = before + sum(map(time.clock_gettime, self.clocks)) - began


def _clock(thread: int) -> int:
    """Return the id of Linux's CPU time clock for a thread, given the native id of the thread."""
    return (~thread << 3) | 6


@dataclass(eq=False, repr=False)
class HookContext:
    """The state that all hooks of one model share, and the methods with which adapters and quantities create hooks.

    The class has many methods, because hooks of the model, of its framework and of quantities use the same state.
    """

    boundary: ErrorBoundary
    _: KW_ONLY
    team: IntraOpThreads
    lock: contextlib.AbstractContextManager[Any]
    """Held while a step begins or ends."""
    tell: Callable[[str], None]
    """Function that publishes a notice for the user on the console and as an event."""
    active: bool = field(default=True, init=False)
    """False after detach and in a forked child process. No hook has an effect then."""
    cpu_seconds: float = field(default=0.0, init=False)
    """CPU seconds on the training thread of all hooks and of calls of the script."""
    in_forward: bool = field(default=False, init=False)
    """True if a training forward pass of the whole model is running."""
    grad_enabled: bool = field(default=True, init=False)
    """True if gradients were enabled when torch called the hook of a quantity that is running now."""
    _handles: list[Removable] = field(default_factory=list, init=False)
    _published: set[str] = field(default_factory=set, init=False)

    @property
    def micro_step(self) -> int:
        """Number of the current or latest training forward pass within the step, from 0 on, for each model chunk."""
        raise NotImplementedError

    def gradient_arrives(self) -> None:
        """Handle a gradient that is about to be added to a parameter. A step may begin with this gradient."""
        raise NotImplementedError

    def reduced(self) -> None:
        """Handle reduced gradients. Called by a framework that reduces gradients outside of a backward pass."""
        raise NotImplementedError

    def keep(self, handle: Removable) -> None:
        self._handles.append(handle)

    def remove(self) -> None:
        """Remove all hooks. A hook that cannot be removed is reported, and has no effect any more."""
        self.active = False
        with without_tensor_functions():
            for handle in self._handles:
                self.boundary.call("removing a hook", handle.remove)
        self._handles.clear()

    def call(self, where: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)` for a call of the script; None if the function raises or if a tracer is active."""
        return Hook(self, where, function, of_script=True)(*args)

    def tell_once(self, sentence: str) -> None:
        """Publish a notice the first time that this method receives it. Also works while code is being compiled."""
        if sentence not in self._published:
            self._published.add(sentence)
            self.boundary.call("a note", self.tell, sentence)


class Gate(Protocol):
    """The object from which the hooks of one quantity read whether the current step is sampled."""

    @property
    def is_open(self) -> bool:
        """True if the quantity is measured at the current step."""


@dataclass(eq=False, repr=False)
class Hook(NotCopied):
    """A function of the monitor that torch calls. It is wrapped once, when it is registered.

    The hook calls the function only if its context is active and no compiler or tracer is. While a mode of the script
    is active, all modes are disabled during the call. An exception is counted and logged under the name `where`, and
    the hook then returns None. The CPU time of the call is added to that of the context.

    A hook with a gate belongs to a quantity and reads tensors: the function is called only while the gate is open, and
    gradients are disabled during the call. It is also called under a transform of `torch.func` if the transform runs in
    a training forward pass, because the quantity reports transformed tensors. A hook `of_script`, which a method of the
    monitor calls for the script, runs outside of the transform. All other hooks then call the function `transformed`
    instead, without arguments. It may not call torch operations.

    The function `was_compiled` reports a compilation of the hook: Dynamo calls it when it compiles the hook. It must be
    a result of `on_compilation`. The object `owner` is kept alive by the hook, and so by the module that has the hook.
    If the module or tensor with this hook is copied, the copy has a function that does nothing instead.
    """

    context: HookContext
    where: str
    _call: Callable[..., Any]
    _: KW_ONLY
    gate: Gate | None = None
    was_compiled: Callable[[], int] | None = None
    transformed: Callable[[], None] | None = None
    owner: object = None
    of_script: bool = False
    was_called: bool = field(default=False, init=False)
    """True if torch has called the hook, which has a gate, since its registration."""
    on_inactive_call: Callable[[], None] | None = field(default=None, init=False)
    """Function that is called instead of the hook while its gate is closed."""

    @uncompiled
    def __call__(self, *args: Any) -> Any:
        """Call the function, or do nothing and return None (see the class)."""
        # First, and a constant to the compiler: nothing below it becomes part of a graph, and no graph is compiled
        # again when a gate opens or closes.
        if is_dynamo_compiling():
            if self.was_compiled is not None:
                self.was_compiled()
            return None
        context, call = self.context, self._call
        if self.gate is not None:
            self.was_called = True
            if not self.gate.is_open:
                if self.on_inactive_call is not None:
                    self.on_inactive_call()
                return None
            call = self._read
        if not context.active:
            return None
        # The hook of an adapter may call further hooks. Their time is in that of the outer hook.
        began, before = time.thread_time(), context.cpu_seconds
        try:
            with without_tensor_functions():
                return call(*args) if is_plain() else self._call_beside_modes(call, args)
        except Exception as error:  # noqa: BLE001 - the façade: training never stops for telemetry
            context.boundary.report(self.where, error)
            return None
        finally:
            context.cpu_seconds = before + time.thread_time() - began + _CLOCK_READ_SECONDS

    def _read(self, *args: Any) -> None:
        team, enabled = self.context.team, torch.is_grad_enabled()
        self.context.grad_enabled = enabled
        if enabled:
            torch.set_grad_enabled(False)  # takes a third of the time of `no_grad`
        try:
            if team.clocks:
                team.call(self._call, *args)
            else:
                self._call(*args)
        finally:
            if enabled:
                torch.set_grad_enabled(True)

    def _call_beside_modes(self, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call the function outside of the modes of the script; return None without a call under a tracer."""
        if is_traced():
            return None
        if self.gate is not None and self.context.in_forward and is_transformed():
            return call(*args)
        if current_transform() is not None and not self.of_script:
            return None if self.transformed is None else self.transformed()
        return call_outside_of_modes(call, *args)
