"""Puts hooks on a model and its optimizers, and takes every one of them away again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.autograd import Variable

from rankscope_exporter.adapters.base import GradientSource, Removable
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.base.tracing import (
    Entry,
    call_untraced,
    is_dynamo_compiling,
    is_stand_in,
    on_compilation,
    uncompiled,
)
from rankscope_exporter.quantities.base import BACKWARD, Hook, SamplingGate
from rankscope_exporter.training.cpu_time import HookClock
from rankscope_exporter.training.gradient_hooks import GradientHooks
from rankscope_exporter.training.model_changes import REMEDY, ChangedModel, ReplacedOptimizers
from rankscope_exporter.training.recorder import Recorder

_NO_BACKWARD: Final = -1
"""What torch calls the graph task outside of a backward pass."""

_COMPILED_UPDATE: Final = (
    "the optimizer's step runs inside compiled code, where no hook runs: it is noticed at the next forward pass, by"
    " the versions of the parameters. param_after, optimizer state and learning rates are read there; param_before, "
    "grad_clipped and the time of the update are absent"
)
_COMPILED_BACKWARD: Final = (
    "the backward pass runs inside compiled code, where no hook runs: gradients are read when the optimizer steps, and "
    "those that were changed since the backward pass are grad_clipped alone. Gradients of activations, micro_gradients "
    "and the time of the backward pass are absent; call end_step(skipped=True) where the optimizer is not run"
)


class Hooks:
    """The only code that training calls. Each entry goes through `tracing` and the error boundary; `clock` adds up their cost.

    `active` is cleared to make all hooks inert together, as a forked child must.
    """

    def __init__(self, monitored: MonitoredModel, recorder: Recorder, boundary: ErrorBoundary) -> None:
        self.active = True
        self.clock = HookClock(boundary, on_cpu=monitored.device.type == "cpu")
        recorder.step_events.follow(self.clock.team)
        self._monitored = monitored
        self._recorder = recorder
        self._moments = recorder.step_events
        self._boundary = boundary
        self._handles: list[Removable] = []
        self._gradients = GradientHooks(monitored, self._gradient_hook)
        self._changed = ChangedModel(monitored)
        self._replacing = ReplacedOptimizers(monitored.optimizers, self._replaced, monitored.in_model)
        self._backward = self._idle = _NO_BACKWARD
        self.beat: Callable[[], None] = lambda: None
        """Called at every sign that training goes on: a forward, also of an evaluation, a backward, an update."""
        self._in_hook_reads = not monitored.framework.local_until_backward_ends
        self.in_forward = False
        """Whether a training forward of the whole model is under way."""
        self._in_evaluation = False
        self.grad_enabled = True
        """Whether gradients were enabled where the guarded hook that is running was called."""
        self.tell: Callable[[str], None] = lambda _message: None
        """Says something that its reader should know."""
        self._told: set[str] = set()
        self._update_was_compiled = on_compilation(self._update_compiles)
        self._backward_was_compiled = on_compilation(self._backward_compiles)

    def install(self) -> None:
        """Register on the forward of the whole model, every parameter that takes gradients, and every optimizer."""
        self.clock.start()
        self._handles.append(self._monitored.framework.on_forward(Entry(self._forward_begins)))
        self._handles.append(self._monitored.framework.on_forward_end(Entry(self._forward_ended)))
        self._boundary.call("hooks of the framework", self._monitored.framework.install, self)
        self._recorder.install(self)
        self._handles.append(self._gradients)
        self._gradients.hook_all()
        for optimizer in self._monitored.optimizers:
            self._follow(optimizer)
        self._replacing.install(self.keep, self.always)

    def remove(self) -> None:
        """Remove every hook that `install` registered; one that cannot be removed is reported and remains inert."""
        self.active = False
        for handle in self._handles:
            self._boundary.call("removing a hook", handle.remove)
        self._handles.clear()

    # Services for quantities that register their own hooks.

    @property
    def micro_step(self) -> int:
        """Return which training forward of the step was the last to begin, from 0 on, of the chunk that it is of."""
        return max(0, self._recorder.micro_step)

    def keep(self, handle: Removable) -> None:
        """Remove `handle` with the others."""
        self._handles.append(handle)

    def begins_steps(self, module: torch.nn.Module) -> bool:
        """Return whether a step begins with the forward of `module`."""
        return any(module is chunk for chunk in self._monitored.framework.chunks)

    def guarded(self, where: str, function: Callable[..., None], gate: SamplingGate) -> Hook:
        """Return `function` as a hook that is called while `gate` is open."""

        def call(*args: Any) -> None:
            if self.active:
                self.grad_enabled = torch.is_grad_enabled()
                with torch.no_grad():
                    self.clock.timed_reading(where, function, *args)

        return _Gated(call, gate)

    def between(self, function: Callable[[], None]) -> None:
        """Call `function` while no step begins or ends."""
        self._recorder.between(function)

    def always(self, where: str, function: Callable[..., None]) -> Callable[..., None]:
        """Return `function` as a hook that is called at every step, measured or not."""

        def call(*args: Any) -> None:
            if self.active:
                self._boundary.call(where, function, *args)

        return Entry(call)

    def call(self, where: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`, which the script asks for; None where it raises or a tracer is active."""
        return call_untraced(self.clock.timed, where, function, *args)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """See nothing of what runs inside: it is no training."""
        was, self.active = self.active, False
        try:
            yield
        finally:
            self.active = was

    def reduced(self) -> None:
        """Note that a framework has reduced gradients outside of a backward pass."""
        if self.active:
            self._moments.tell("reduced")
            self.call("reading reduced gradients", self._recorder.backward_ended)

    def look_again(self) -> None:
        """Hook all gradients, and notice parameters that were thawed or replaced; called when a measured step begins.

        Raises LookupError once for each parameter that the model no longer uses, after retiring it.
        """
        self._gradients.hook_all()
        added = self._changed.added()
        if added > 0:
            self.tell(f"the optimizer has {added} parameters more than before, which are not measured: {REMEDY}")
        gone = self._changed.gone()
        if gone:
            names = ", ".join(self._monitored.parameters[i].name for i in gone[:3])
            raise LookupError(
                f"{len(gone)} parameters were replaced after attach() and are measured no more ({names}): {REMEDY}"
            )

    def rest(self) -> None:
        """Leave on the gradients what shows a backward pass; called when a step begins that is not measured."""
        self._gradients.keep_few()

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        begins, updated = Entry(self._update_begins, self._update_was_compiled), Entry(self._updated)
        self._handles += self._monitored.framework.on_update(optimizer, begins, updated)

    def _replaced(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow an optimizer that has just made its first step in the place of others."""
        self._follow(optimizer)
        self._changed.added()  # those of another optimizer are no more and no less
        self._updated(optimizer, (), {})
        self.tell(
            f"the optimizer was replaced after attach(): {type(optimizer).__name__} is followed from now on; "
            f"state of a kind that the former did not have is not measured: {REMEDY}"
        )

    def _gradient_hook(self, index: int) -> Callable[[GradientSource], None]:
        # A number for each backward pass, nested ones included; no public name for it exists.
        pass_under_way = torch._C._current_graph_task_id  # noqa: SLF001 - see above
        was_compiled = self._backward_was_compiled

        @uncompiled
        def ready(holder: GradientSource) -> None:
            if is_dynamo_compiling():  # first, see `Entry`
                was_compiled()
            # Where nothing is measured the first gradient has told all: the others come by at every step.
            elif pass_under_way() != self._idle:
                call_untraced(self._gradient_ready, index, holder, pass_under_way())

        return ready

    def _update_compiles(self) -> None:
        if self.active:
            self._boundary.call("a compiled update", self._recorder.update_compiles)
            self.tell_once(_COMPILED_UPDATE)

    def _backward_compiles(self) -> None:
        if self.active:
            self._monitored.compiled.add(BACKWARD)
            self.tell_once(_COMPILED_BACKWARD)

    def tell_once(self, sentence: str) -> None:
        """Publish a note, the first time that it is given; also while code is compiled."""
        if sentence not in self._told:
            self._told.add(sentence)
            self._boundary.call("a note", self.tell, sentence)

    def _forward_begins(self, module: torch.nn.Module, inputs: Any) -> None:
        if not self.active or any(map(is_stand_in, inputs)):
            return
        self.beat()
        # The user's own module: Lightning leaves a wrapper in evaluation mode after the first validation.
        if self._monitored.framework.module.training and torch.is_grad_enabled():
            self.in_forward = True
            self.clock.timed("a forward hook", self._recorder.forward_begins, self._monitored.framework.chunk(module))
        else:
            self._in_evaluation = True
            self.clock.timed("a forward hook", self._recorder.evaluation_begins)

    def _forward_ended(self, *_: Any) -> None:
        was_training, self.in_forward = self.in_forward, False
        was_evaluation, self._in_evaluation = self._in_evaluation, False
        if self.active and was_training:
            self._moments.tell("forward_ended")
        elif self.active and was_evaluation:
            self._moments.tell("evaluation_ended")

    def _gradient_ready(self, index: int, holder: GradientSource, backward: int) -> None:
        if not self.active:
            return
        if backward != self._backward:
            self.clock.timed("a backward hook", self._pass_begins, backward)
        is_witness = self._gradients.called(index)
        if not self._recorder.sampling:
            self._recorder.saw_gradient(index)
            self._idle = backward if is_witness else self._idle
        elif self._in_hook_reads:
            self.clock.timed_reading("a gradient hook", self._recorder.gradient_ready, index, holder)
        else:
            self._boundary.call("a gradient hook", self._recorder.gradient_ready, index, holder)

    def gradient_arrives(self) -> None:
        """Note that a gradient is on its way to a parameter; a step may begin with it."""
        if self._gradients.begin_steps:
            backward = torch._C._current_graph_task_id()  # noqa: SLF001 - as in _gradient_hook
            if backward != self._backward:
                self._boundary.call("a backward hook", self._pass_begins, backward)

    def _pass_begins(self, backward: int) -> None:
        self._backward = backward
        self._gradients.pass_begins()
        self.beat()
        if self._recorder.backward_begins():
            self._gradients.stay()
        self._moments.tell("backward_begins")
        _when_backward_ends(Entry(self._backward_ends))

    def _backward_ends(self) -> None:
        # Callbacks run in the order in which they were queued. DDP queues its own with its last gradient, so this
        # first one runs before reduced gradients are written back, and one queued from here runs after that.
        self._moments.tell("backward_ends")
        if self._recorder.sampling:
            self.clock.timed("reading local gradients", self._recorder.backward_ends)
        self._boundary.call("the end of backward", _when_backward_ends, Entry(self._backward_ended))

    def _backward_ended(self) -> None:
        self._moments.tell("backward_ended")
        if self._recorder.sampling:
            self.clock.timed("reading reduced gradients", self._recorder.backward_ended)

    def _update_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self.active:
            return None
        self.beat()
        self._replacing.followed_begins(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        begins = functools.partial(self._recorder.update_begins, computes_gradients=callable(closure))
        self.clock.timed("an optimizer hook", begins, optimizer)
        if not callable(closure) or not self._recorder.sampling:
            return None
        # Forward, backward and clipping may all happen in there: what the optimizer sees is known when it returns.
        observed = functools.partial(self._observed, closure)
        return (
            (args, {**kwargs, "closure": observed}) if "closure" in kwargs else ((args[0], observed, *args[2:]), kwargs)
        )

    def _observed(self, closure: Callable[[], Any]) -> Any:
        result = closure()
        if self.active:
            self.call("an optimizer hook", self._recorder.gradients_computed)
        return result

    def _updated(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self.active:
            self.beat()
            self._replacing.followed_ended(optimizer)
            self.clock.timed("an optimizer hook", self._recorder.updated, optimizer)


def _when_backward_ends(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass under way has computed all gradients.

    Torch has no public hook for that moment; DDP and FSDP themselves use this one.
    """
    Variable._execution_engine.queue_callback(callback)  # noqa: SLF001 - see above


class _Gated(Entry):
    """A hook that is called at every step and does something at few: closed, it does next to nothing."""

    def __init__(self, call: Callable[..., None], gate: SamplingGate) -> None:
        super().__init__(call, on_compilation(self._compiles))
        self._gate = gate
        self.was_called = False
        self.is_compiled = False
        self.on_inactive_call: Callable[[], None] = lambda: None

    @uncompiled
    def __call__(self, *args: Any) -> None:
        """Call the function while the gate is open."""
        if is_dynamo_compiling():  # first, see `Entry`: a graph would be compiled again when the gate opens or closes
            if self._was_compiled is not None:
                self._was_compiled()
            return
        self.was_called = True
        if self._gate.is_open:
            call_untraced(self._call, *args)
        else:
            self.on_inactive_call()

    def _compiles(self) -> None:
        self.is_compiled = True
