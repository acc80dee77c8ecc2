"""The hooks on a model, its parameters and its optimizers. They detect the start, the phases and the end of a step."""

from __future__ import annotations

import operator
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from rankscope_exporter.adapters.base import Framework, GradientSource
from rankscope_exporter.adapters.hook_context import NO_KEYWORDS, Hook, HookContext
from rankscope_exporter.adapters.torch_private import (
    NO_PASS,
    autograd_engine,
    current_pass,
    forward_pre_hooks,
    makes_state,
    parameters_of,
    running_calls,
    running_optimizer_steps,
)
from rankscope_exporter.adapters.tracing import (
    STAND_INS,
    is_dynamo_compiling,
    is_transformed,
    on_compilation,
    uncompiled,
)
from rankscope_exporter.measure.quantities.base import BACKWARD, REMEDY, UPDATE, Quantity
from rankscope_exporter.monitors.hangs.watchdog import Watchdog
from rankscope_exporter.process.inert import NotCopied
from rankscope_exporter.training.gradient_hooks import HookFactory
from rankscope_exporter.training.model_changes import NewOptimizers
from rankscope_exporter.training.recorder import Recorder
from rankscope_exporter.training.sampling import ActiveQuantities

_CLASS_NAME: Final = operator.attrgetter("__name__")
_FORWARD: Final = "a forward hook"
_GRADIENT: Final = "a gradient hook"
_OPTIMIZER: Final = "an optimizer hook"

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
_COPIES: Final = (
    "parameters of the model are in no optimizer, but one has other tensors, which may be copies: values after an "
    "update are read when the step ends, and the state of the optimizer is absent for these parameters"
)
_CONSUMED: Final = (
    "gradients are deleted before their backward pass ends, as an optimizer does that updates parameters inside the "
    "pass: each such pass counts as an update, and these gradients are absent"
)


class Hooks(HookContext):
    """All functions of the monitor that the training calls through hooks."""

    def __init__(self, recorder: Recorder, *, tell: Callable[[str], None], watchdog: Watchdog) -> None:
        super().__init__(recorder.boundary, team=recorder.team, lock=recorder.current.lock, tell=tell)
        monitored = self.monitored = recorder.monitored
        self._recorder = recorder
        self._current = recorder.current
        self._gradients = recorder.gradients
        self._note = recorder.note
        self._watchdog = watchdog
        self._new_optimizers = NewOptimizers(
            monitored.optimizers, self._new_optimizer, monitored.places, ignored=self._steps_in_forward
        )
        self._backward = self._listed = NO_PASS
        self.forward_thread = self.evaluation_thread = 0  # of the latest ones
        self._inner: dict[int, int] = {}  # by thread: forward passes of the root inside of its own forward pass
        self._without_effect: set[int] = set()  # optimizers in a step that is none of the training, by identity
        self._passes = 0  # backward passes that have begun and not ended: reentrant checkpointing nests them
        self._updated_in_pass = False
        self._handled = id(None)  # the exception that the training handled when the forward pass began, by identity
        self._reads_in_hooks = not monitored.framework.traits.local_until_backward_ends
        self._has_chunks = len(monitored.framework.chunks) > 1
        self._is_unwrapped = type(monitored.framework).module is Framework.module
        self.in_evaluation = False
        self._update_was_compiled = on_compilation(self._update_compiles)
        self._when_gradients_ready = Hook(self, "reading local gradients", self._gradients_ready)
        self._when_backward_ended = Hook(self, "reading reduced gradients", self._backward_ended)
        self._when_loaded = Hook(self, "a hook on a loaded state", self._state_loaded)
        self.log = Hook(self, "log()", recorder.log, of_script=True)
        self.end_step = Hook(self, "end_step()", recorder.end_step, of_script=True)

    def install(self, active_quantities: ActiveQuantities, owner: object = None) -> None:
        """Register hooks on the forward pass of the model, on parameters with gradients, and on optimizers.

        The model holds `owner` through the hooks on its forward pass; this object does not.
        """
        framework = self.monitored.framework
        begins = Hook(self, _FORWARD, self._forward_begins, transformed=self._forward_is_transformed, owner=owner)
        self.keep(framework.on_forward(begins))
        self.keep(framework.on_forward_end(Hook(self, _FORWARD, self._forward_ended, owner=owner)))
        for module in framework.module.modules():
            if parameters_of(module):  # the state dict of a part of the model may be loaded
                self.boundary.call("registering hooks on loads", self._follow_loads, module)
        self.boundary.call("registering hooks of the framework", framework.install, self)
        active_quantities.install(self)
        self.keep(self._gradients)
        self.boundary.call("registering gradient hooks", self._gradients.install, self._gradient_hooks())
        for optimizer in self.monitored.optimizers:
            self._follow(optimizer)
        self._new_optimizers.install(self)

    # Reports of quantities and adapters.

    @property
    def micro_step(self) -> int:
        return max(0, self._recorder.micro_step)

    def gradient_arrives(self) -> None:
        if self._gradients.begin_steps and current_pass() != self._backward and not _is_in_forward(self):
            self._pass_begins(current_pass())

    def reduced(self) -> None:
        if self.active:
            self.call("reading reduced gradients", self._recorder.measure, Quantity.on_backward_end)

    def _steps_in_forward(self) -> bool:
        """Return whether an optimizer that begins its step does so in a forward pass, as in test-time training."""
        is_inside = _is_in_forward(self)
        self._current.is_loaded |= is_inside
        return is_inside

    def _state_loaded(self, *_: Any) -> None:
        self._current.is_loaded = True

    # Forward passes.

    def _forward_begins(self, module: torch.nn.Module, inputs: Any, named: Mapping[str, Any] = NO_KEYWORDS) -> None:
        if not STAND_INS.isdisjoint(map(_CLASS_NAME, map(type, (*inputs, *named.values())))):
            return
        if is_transformed():  # forward-mode differentiation without torch.func
            self._forward_is_transformed()
            return
        self._watchdog.active_at = time.monotonic()
        thread = threading.get_ident()
        if (self.in_forward or self.in_evaluation) and _is_in_forward(self, begins=True):
            self._inner[thread] = self._inner.get(thread, 0) + 1
            return
        self._inner.pop(thread, None)
        self._handled = id(sys.exc_info()[1])
        # The user's own module: Lightning leaves a wrapper in evaluation mode after the first validation.
        is_training = module.training if self._is_unwrapped else self.monitored.framework.is_training()
        is_training = is_training and torch.is_grad_enabled()
        if self.in_forward and (is_training or thread == self.forward_thread):
            self.in_forward = False
            self._recorder.forward_failed()  # by an interrupt, after which torch calls no hook
        if not is_training:
            self.in_evaluation, self.evaluation_thread = True, thread
            self._recorder.evaluation_begins()
            return
        update = self.monitored.update
        update.is_running = update.is_running and running_optimizer_steps() > 0  # else it has raised
        self.in_forward, self.forward_thread = True, thread
        self._passes = 0  # a backward pass that raised has not ended
        self._reads_in_hooks = not self.monitored.framework.traits.local_until_backward_ends  # a new DDP has others
        self._recorder.forward_begins(self.monitored.framework.chunk(module) if self._has_chunks else 0)

    def _forward_is_transformed(self) -> None:
        self._watchdog.active_at = time.monotonic()
        self._recorder.transformed_forward()

    def _forward_ended(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        thread = threading.get_ident()
        if self._inner.get(thread):
            self._inner[thread] -= 1
        elif self.in_forward and thread == self.forward_thread:
            self.in_forward = False
            self._note("forward_ended")
            if id(sys.exc_info()[1]) != self._handled:
                self._recorder.forward_failed()
            elif self._current.is_sampled and not self._has_chunks:
                self._recorder.forward_ended(output)
        elif self.in_evaluation and thread == self.evaluation_thread:
            self.in_evaluation = False
            self._note("evaluation_ended")

    # Backward passes.

    def _gradient_hooks(self) -> HookFactory:
        was_compiled = on_compilation(self._backward_compiles)
        gradient_ready = Hook(self, _GRADIENT, self._gradient_ready)
        arrives = self.monitored.update.arrived.append

        def hook_of(index: int) -> Callable[[GradientSource], None]:
            def ready(holder: GradientSource) -> None:
                if is_dynamo_compiling():  # the first line, see `Hook`
                    was_compiled()
                elif current_pass() == self._listed:
                    arrives(index)
                else:
                    gradient_ready(index, holder)

            return ready

        uncompiled(hook_of(0))  # marks the code object, which all hooks have in common
        return hook_of

    def _gradient_ready(self, index: int, holder: GradientSource) -> None:
        """Handle the first gradient of a pass; of a sampled step, each gradient that must be read in its hook.

        All other gradients of the pass are only listed.
        """
        backward = current_pass()
        if backward != self._backward:
            if (self.in_forward or self.in_evaluation) and _is_in_forward(self):  # the model trains a part of itself
                return
            self._pass_begins(backward)
        self.monitored.update.arrived.append(index)
        if self._reads_in_hooks and self._current.is_sampled:
            self._recorder.gradient_ready(index, holder)
        else:
            self._listed = backward

    def _pass_begins(self, backward: int) -> None:
        self._backward = backward
        if self.in_forward:
            self.in_forward = False
            self._recorder.forward_failed()  # see `_forward_begins`
        self._passes += 1
        self._watchdog.active_at = time.monotonic()
        try:
            self._gradients.pass_begins()
            if self._recorder.backward_begins():
                self._gradients.begin_steps = True
                if _has_lost_hooks(self.monitored.framework):
                    self.tell_once(_LOST_HOOKS)
            autograd_engine().queue_callback(self._when_gradients_ready)
        except Exception as error:  # noqa: BLE001 - an error here must not hide the gradient that has arrived
            self.boundary.report("a backward hook", error)

    def _gradients_ready(self) -> None:
        # Callbacks run in the order in which they were queued. DDP queues its own with its last gradient. This first
        # callback therefore runs before reduced gradients are written back, and one queued from here runs after it.
        autograd_engine().queue_callback(self._when_backward_ended)
        self._recorder.measure(Quantity.on_gradients_ready, "backward_ends")

    def _backward_ended(self) -> None:
        self._recorder.measure(Quantity.on_backward_end, "backward_ended")
        self._passes -= 1
        if self._passes > 0:
            return
        is_consumed = self._gradients.pass_ended() and not self._reads_in_hooks
        if self._updated_in_pass or is_consumed:
            if not self._updated_in_pass:
                self.tell_once(_CONSUMED)
            self._updated_in_pass = False
            self._recorder.updated()

    def _backward_compiles(self) -> None:
        if self.active:
            self.monitored.compiled.add(BACKWARD)
            self.tell_once(_COMPILED_BACKWARD)

    # Updates.

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        self._gradients.are_updated_by_hand = False
        begins = Hook(self, _OPTIMIZER, self._update_begins, was_compiled=self._update_was_compiled)
        updated = Hook(self, _OPTIMIZER, self._updated)
        self._handles += self.monitored.framework.on_update(optimizer, begins, updated)
        self.boundary.call("registering hooks on loads", self._follow_loads, optimizer)

    def _follow_loads(self, holder: torch.nn.Module | torch.optim.Optimizer) -> None:
        register = getattr(holder, "register_load_state_dict_post_hook", None)
        if register is not None and not isinstance(holder, torch.jit.ScriptModule):  # torch refuses hooks on the latter
            self.keep(register(self._when_loaded))

    def _new_optimizer(self, optimizer: torch.optim.Optimizer, *, replaces: bool) -> None:
        """Register hooks on `optimizer` after its first step, and publish a notice."""
        self._follow(optimizer)
        self._current.is_loaded = True  # its state does not follow from that of the optimizer before
        if current_pass() != NO_PASS:
            self._updates_in_backward(optimizer, has_stepped=True)
        else:
            self._recorder.new_optimizer(optimizer, replaces=replaces)
            self._updated(optimizer, (), {})
        event = "the optimizer was replaced after attach()" if replaces else "an optimizer unknown to attach() stepped"
        self.tell_once(f"{event}: the monitor now observes {type(optimizer).__name__}")

    def _update_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._watchdog.active_at = time.monotonic()
        rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
        has_effect = isinstance(rate, int | float) and rate
        is_inside = (self.in_forward or self.in_evaluation) and _is_in_forward(self)
        self._current.is_loaded |= is_inside
        if is_inside or (not has_effect and makes_state(optimizer)):
            self._without_effect.add(id(optimizer))
            return None
        self._without_effect.discard(id(optimizer))  # its last step has raised
        self._new_optimizers.followed_begins(optimizer)
        if current_pass() != NO_PASS:
            self._updates_in_backward(optimizer)
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._recorder.update_begins(optimizer, computes_gradients=callable(closure))
        self.monitored.update.is_running = not callable(closure)
        if self._recorder.forwards_are_transformed:
            self.tell_once(_TRANSFORMED)
        if self._recorder.updates_copies:
            self.tell_once(_COPIES)
        if not callable(closure) or not self._current.is_sampled:
            return None

        # Forward, backward and clipping may all run inside the closure: read the gradients when it returns.
        def observed() -> Any:
            result = closure()
            if self.active:
                self.call(_OPTIMIZER, self._recorder.gradients_computed)
            return result

        return (
            (args, {**kwargs, "closure": observed}) if "closure" in kwargs else ((args[0], observed, *args[2:]), kwargs)
        )

    def _updates_in_backward(self, optimizer: torch.optim.Optimizer, *, has_stepped: bool = False) -> None:
        """Handle a step of `optimizer` inside a backward pass. The update ends with the pass to which it belongs."""
        if current_pass() != self._backward:
            self._pass_begins(current_pass())
        self._updated_in_pass = True
        self._recorder.update_in_backward(optimizer, has_stepped=has_stepped)

    def _updated(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._watchdog.active_at = time.monotonic()
        if id(optimizer) in self._without_effect:
            self._without_effect.remove(id(optimizer))
            return
        self._new_optimizers.stepping.discard(id(optimizer))
        self.monitored.update.is_running = False
        if current_pass() == NO_PASS:
            self._recorder.updated(optimizer)

    def _update_compiles(self) -> None:
        if self.active:
            self.monitored.compiled.add(UPDATE)
            self.boundary.call("a compiled update", self._recorder.update_compiles)
            self.tell_once(_COMPILED_UPDATE)


def _is_in_forward(hooks: Hooks, *, begins: bool = False) -> bool:
    """Return whether a training forward pass of the model runs, or an evaluation of which this call is a part.

    `begins` is true if this call is inside of a forward pass that begins now. The flags may be stale.
    """
    if not (hooks.in_forward or hooks.in_evaluation):
        return False
    thread, modules = threading.get_ident(), hooks.monitored.framework.chunks
    training, evaluation = hooks.forward_thread, hooks.evaluation_thread
    if hooks.in_forward and running_calls(modules, training) > (begins and thread == training):
        return True
    # A thread of autograd, which Python does not know, may run the backward pass of an evaluation.
    is_own = thread == evaluation or all(item.ident != thread for item in threading.enumerate())
    return hooks.in_evaluation and is_own and running_calls(modules, evaluation) > (begins and thread == evaluation)


def _has_lost_hooks(framework: Framework) -> bool:
    """Return whether other code has removed the forward hooks, so that a step begins with a gradient."""
    tables = [forward_pre_hooks(module).values() for module in (*framework.chunks, framework.module)]
    has_hooks = any(isinstance(hook, NotCopied) for hooks in tables for hook in hooks)
    return framework.announced is None and bool(framework.hookable_chunks) and not has_hooks
