"""The hooks on a model, its parameters and its optimizers.

They detect the beginning, the phases and the end of a step.

The context in which the hooks of the monitor run. Quantities and adapters register their hooks through it.

Hooks do nothing after detach and in a forked child process. Errors in hooks are caught, and their CPU time is measured.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.autograd import Variable

from rankscope_exporter.adapters.base import GradientSource
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.parameter_hooks import Removable
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.base.tracing import (
    Entry,
    call_untraced,
    call_untransformed,
    is_dynamo_compiling,
    is_stand_in,
    is_traced,
    is_transformed,
    on_compilation,
    uncompiled,
)
from rankscope_exporter.quantities.base import BACKWARD, REMEDY, UPDATE, Hook, Quantity, SamplingGate
from rankscope_exporter.quantities.module_quantity import NO_PASS, current_pass, in_backward
from rankscope_exporter.records.pending_step import StepEvents
from rankscope_exporter.sampling.active_quantities import ActiveQuantities
from rankscope_exporter.training.cpu_time import HookClock
from rankscope_exporter.training.current_step import CurrentStep
from rankscope_exporter.training.gradient_hooks import GradientHooks, HookFactory
from rankscope_exporter.training.model_changes import ModelChanges, NewOptimizers
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


_COMPILED_UPDATE: Final = (
    "the optimizer's step runs inside compiled code, where no hook runs: the monitor detects the step at the next "
    "forward pass, by the versions of the parameters, and reads param_after, optimizer state and learning rates then; "
    "param_before, grad_clipped and the time of the update are absent"
)
_COMPILED_BACKWARD: Final = (
    "the backward pass runs inside compiled code, where no hook runs: gradients are read when the optimizer steps, and "
    "gradients that were changed since the backward pass are available as grad_clipped only. Gradients of activations, "
    "micro_gradients and the time of the backward pass are absent; call end_step(skipped=True) if the optimizer is not "
    "run"
)
_LOST_HOOKS: Final = (
    "other code has removed the forward hooks of the model: steps begin with their first gradient, and activations and "
    f"the time of the forward pass are absent: {REMEDY}"
)
_TRANSFORMED: Final = (
    "the forward passes of this training run under transforms of torch.func, where no hook can read a tensor: a step "
    "ends when its optimizer steps again, and all values that are read in forward passes are absent"
)
_CONSUMED: Final = (
    "gradients are deleted before their backward pass ends, as an optimizer does that updates parameters inside the "
    "pass: each such pass counts as an update, and these gradients are absent"
)


class Hooks(HookContext):
    """All functions of the monitor that the training calls through hooks.

    Each call runs inside the functions of `base.tracing`, which ignore calls by tracers, and inside the error boundary,
    which catches errors.
    """

    def __init__(
        self,
        monitored: MonitoredModel,
        recorder: Recorder,
        events: StepEvents,
        boundary: ErrorBoundary,
        *,
        current: CurrentStep,
        gradients: GradientHooks,
        changes: ModelChanges,
        clock: HookClock,
        tell: Callable[[str], None],
        beat: Callable[[], None],
    ) -> None:
        super().__init__(monitored, recorder, boundary, clock=clock, lock=current.lock, tell=tell)
        self._events = events
        self._current = current
        self._gradients = gradients
        self._changes = changes
        self._beat = beat
        """Function that is called at each forward pass, including evaluation, at each backward pass and at each update.

        It shows the watchdog that the training makes progress.
        """
        self._new_optimizers = NewOptimizers(monitored.optimizers, self._new_optimizer, monitored.in_model)
        self._backward = self._idle = NO_PASS
        self._passes = 0  # backward passes that have begun and not ended: reentrant checkpointing nests them
        self._updated_in_pass = False
        self._handled = id(None)  # the exception that the training handled when the forward pass began, by identity
        self._reads_in_hooks = not monitored.framework.traits.local_until_backward_ends
        self._in_evaluation = False
        self._update_was_compiled = on_compilation(self._update_compiles)
        self._backward_was_compiled = on_compilation(self._backward_compiles)

    def install(self, active_quantities: ActiveQuantities, owner: object = None) -> None:
        """Register hooks on the forward pass of the model, on parameters with gradients, and on optimizers.

        The model holds `owner` through the hooks on its forward pass; this object does not.
        """
        self.clock.start()
        forward = Entry(self._forward_begins, self._boundary, transformed=self._forward_is_transformed, owner=owner)
        self.keep(self._monitored.framework.on_forward(forward))
        self.keep(self._monitored.framework.on_forward_end(Entry(self._forward_ended, self._boundary, owner=owner)))
        self._boundary.call("registering hooks of the framework", self._monitored.framework.install, self)
        active_quantities.install(self)
        self.keep(self._gradients)
        self._boundary.call("registering gradient hooks", self._gradients.install, self._gradient_hooks())
        for optimizer in self._monitored.optimizers:
            self._follow(optimizer)
        self._new_optimizers.install(self.keep, self.always)

    # Reports of quantities and adapters.

    def gradient_arrives(self) -> None:
        """Handle a gradient that is about to be added to a parameter. A step may begin with this gradient."""
        if self._gradients.begin_steps:
            backward = current_pass()
            if backward != self._backward:
                self._boundary.call("a backward hook", self._pass_begins, backward)

    def reduced(self) -> None:
        """Handle reduced gradients. Called by a framework that reduces gradients outside of a backward pass."""
        if self.active:
            self._events.on_gradients_reduced()
            self.call("reading reduced gradients", self._recorder.measure, Quantity.on_backward_end)

    # Forward passes.

    def _forward_begins(self, module: torch.nn.Module, inputs: Any, named: Mapping[str, Any]) -> None:
        if not self.active or any(map(is_stand_in, (*inputs, *named.values()))):
            return
        if is_transformed():  # forward-mode differentiation without torch.func
            self._forward_is_transformed()
            return
        self._beat()
        self._handled = id(sys.exc_info()[1])
        # The user's own module: Lightning leaves a wrapper in evaluation mode after the first validation.
        if self._monitored.framework.module.training and torch.is_grad_enabled():
            self.in_forward = True
            self._passes = 0  # a backward pass that raised has not ended
            self.clock.timed("a forward hook", self._recorder.forward_begins, self._monitored.framework.chunk(module))
        else:
            self._in_evaluation = True
            self.clock.timed("a forward hook", self._recorder.evaluation_begins)

    def _forward_is_transformed(self) -> None:
        if self.active:
            self._beat()
            self._boundary.call("a forward hook", self._recorder.transformed_forward)

    def _forward_ended(self, module: torch.nn.Module, *_: Any) -> None:
        was_training, self.in_forward = self.in_forward, False
        was_evaluation, self._in_evaluation = self._in_evaluation, False
        if self.active and was_training:
            self._events.on_forward_end()
            if id(sys.exc_info()[1]) != self._handled:
                self._boundary.call(
                    "a forward hook", self._recorder.forward_failed, self._monitored.framework.chunk(module)
                )
        elif self.active and was_evaluation:
            self._events.on_evaluation_end()

    # Backward passes.

    def _gradient_hooks(self) -> HookFactory:
        was_compiled, call = self._backward_was_compiled, self._boundary.call

        def hook_of(index: int) -> Callable[[GradientSource], None]:
            def ready(holder: GradientSource) -> None:
                if is_dynamo_compiling():  # the first line, see `Entry`
                    was_compiled()
                # At a step that is not sampled, the call for a witness is sufficient: skip the others of the same pass.
                elif current_pass() != self._idle:
                    call("a gradient hook", call_untransformed, self._gradient_ready, index, holder, current_pass())

            return ready

        uncompiled(hook_of(0))  # marks the code object, which all hooks have in common
        return hook_of

    def _gradient_ready(self, index: int, holder: GradientSource, backward: int) -> None:
        if not self.active:
            return
        if backward != self._backward:
            self.clock.timed("a backward hook", self._pass_begins, backward)
        is_witness = self._gradients.called(index)
        if not self._current.is_sampled:
            self._idle = backward if is_witness else self._idle
        elif self._reads_in_hooks:
            self.clock.timed_reading("a gradient hook", self._recorder.gradient_ready, index, holder)
        else:
            self._boundary.call("a gradient hook", self._recorder.gradient_ready, index, holder)

    def _pass_begins(self, backward: int) -> None:
        self._backward = backward
        self._passes += 1
        self._gradients.pass_begins()
        self._beat()
        if self._recorder.backward_begins():
            self._gradients.keep_all()
            self._note_lost_hooks()
        self._events.on_backward_begin()
        _when_backward_ends(Entry(self._gradients_ready, self._boundary))

    def _note_lost_hooks(self) -> None:
        """Publish a notice if a step begins with a gradient because other code has removed the forward hooks."""
        framework = self._monitored.framework
        if framework.announced is None and not any(map(_has_own_hook, framework.chunks)):
            self.tell_once(_LOST_HOOKS)

    def _gradients_ready(self) -> None:
        # Callbacks run in the order in which they were queued. DDP queues its own with its last gradient. This first
        # callback therefore runs before reduced gradients are written back, and one queued from here runs after it.
        self._events.on_gradients_ready()
        if self._current.is_sampled:
            self.clock.timed("reading local gradients", self._recorder.measure, Quantity.on_gradients_ready)
        self._boundary.call(
            "adding a callback at the end of backward", _when_backward_ends, Entry(self._backward_ended, self._boundary)
        )

    def _backward_ended(self) -> None:
        self._events.on_backward_end()
        if self._current.is_sampled:
            self.clock.timed("reading reduced gradients", self._recorder.measure, Quantity.on_backward_end)
        self._passes -= 1
        if self._passes > 0:
            return
        is_consumed = not self._reads_in_hooks and self._gradients.are_deleted()
        if self._updated_in_pass or is_consumed:
            if not self._updated_in_pass:
                self.tell_once(_CONSUMED)
            self._updated_in_pass = False
            self.clock.timed("an optimizer hook", self._recorder.updated)

    def _backward_compiles(self) -> None:
        if self.active:
            self._monitored.compiled.add(BACKWARD)
            self.tell_once(_COMPILED_BACKWARD)

    # Updates.

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        begins = Entry(self._update_begins, self._boundary, self._update_was_compiled)
        updated = Entry(self._updated, self._boundary)
        self._handles += self._monitored.framework.on_update(optimizer, begins, updated)

    def _new_optimizer(self, optimizer: torch.optim.Optimizer, *, replaces: bool) -> None:
        """Register hooks on `optimizer` after its first step, and publish a notice."""
        self._follow(optimizer)
        self._changes.added()  # the parameters of another optimizer are not additional ones
        if in_backward():
            self._updates_in_backward(optimizer, has_stepped=True)
        else:
            begins = functools.partial(self._recorder.new_optimizer, replaces=replaces)
            self._boundary.call("an optimizer hook", begins, optimizer)
            self._updated(optimizer, (), {})
        event = "the optimizer was replaced after attach()" if replaces else "an optimizer unknown to attach() stepped"
        self.tell_once(f"{event}: the monitor now observes {type(optimizer).__name__}")

    def _update_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self.active:
            return None
        self._beat()
        self._new_optimizers.followed_begins(optimizer)
        if in_backward():
            self._updates_in_backward(optimizer)
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        begins = functools.partial(self._recorder.update_begins, computes_gradients=callable(closure))
        self.clock.timed("an optimizer hook", begins, optimizer)
        if self._recorder.forwards_are_transformed:
            self.tell_once(_TRANSFORMED)
        if not callable(closure) or not self._current.is_sampled:
            return None

        # Forward, backward and clipping may all run inside the closure: read the gradients when it returns.
        def observed() -> Any:
            result = closure()
            if self.active:
                self.call("an optimizer hook", self._recorder.gradients_computed)
            return result

        return (
            (args, {**kwargs, "closure": observed}) if "closure" in kwargs else ((args[0], observed, *args[2:]), kwargs)
        )

    def _updates_in_backward(self, optimizer: torch.optim.Optimizer, *, has_stepped: bool = False) -> None:
        """Handle a step of `optimizer` inside a backward pass. The update ends with the pass to which it belongs."""
        backward = current_pass()
        if backward != self._backward:
            self.clock.timed("a backward hook", self._pass_begins, backward)
        self._updated_in_pass = True
        updates = functools.partial(self._recorder.update_in_backward, has_stepped=has_stepped)
        self.clock.timed("an optimizer hook", updates, optimizer)

    def _updated(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self.active:
            self._beat()
            self._new_optimizers.followed_ended(optimizer)
            if in_backward():
                return
            self.clock.timed("an optimizer hook", self._recorder.updated, optimizer)

    def _update_compiles(self) -> None:
        if self.active:
            self._monitored.compiled.add(UPDATE)
            self._boundary.call("a compiled update", self._recorder.update_compiles)
            self.tell_once(_COMPILED_UPDATE)


def _has_own_hook(module: torch.nn.Module) -> bool:
    return any(isinstance(hook, Entry) for hook in module._forward_pre_hooks.values())  # noqa: SLF001 - torch has no public name for it


def _when_backward_ends(callback: Callable[[], None]) -> None:
    """Call `callback` when the present backward pass has computed all gradients.

    Torch has no public hook for this event. DDP and FSDP use the same private function of torch.
    """
    Variable._execution_engine.queue_callback(callback)  # noqa: SLF001 - see above
