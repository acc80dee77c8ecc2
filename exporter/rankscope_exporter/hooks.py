"""Puts hooks on a model and its optimizers, and takes every one of them away again."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from rankscope_exporter.guard import Guard
from rankscope_exporter.quantities.base import Subject
from rankscope_exporter.recorder import Recorder


class Hooks:
    """The only code that training calls. Each entry goes through the guard; `cpu_seconds` is what they cost.

    `active` is cleared to make all hooks inert at once, as a forked child must.
    """

    def __init__(self, subject: Subject, recorder: Recorder, guard: Guard) -> None:
        self.active = True
        self.cpu_seconds = 0.0
        """CPU time spent in hooks, in seconds; the autograd thread's share included."""
        self._subject = subject
        self._recorder = recorder
        self._guard = guard
        self._handles: list[RemovableHandle] = []
        self._backward_seen = False
        self._order = 0
        self._in_hook_reads = not subject.framework.local_until_backward_ends

    def install(self) -> None:
        """Register on the outermost module, every parameter that takes gradients, and every optimizer."""
        model = self._subject.framework.model
        self._handles.append(model.register_forward_pre_hook(self._forward_begins))
        for index, named in enumerate(self._subject.parameters):
            if named.parameter.requires_grad:
                hook = functools.partial(self._gradient_ready, index)
                register = named.parameter.register_post_accumulate_grad_hook
                self._handles.append(register(hook))  # type: ignore[no-untyped-call]  # untyped in torch
        for optimizer in self._subject.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._update_begins))
            self._handles.append(optimizer.register_step_post_hook(self._updated))

    def remove(self) -> None:
        """Remove every hook that `install` registered."""
        self.active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _forward_begins(self, module: torch.nn.Module, _inputs: Any) -> None:
        if self.active and module.training and torch.is_grad_enabled():
            self._backward_seen = False
            self._timed("a forward hook", self._recorder.forward_begins)

    def _gradient_ready(self, index: int, _parameter: torch.Tensor) -> None:
        if not self.active:
            return
        if not self._backward_seen:
            self._backward_seen = True
            self._order = 0
            self._timed("a backward hook", self._backward_begins)
        self._order += 1
        if self._in_hook_reads:
            self._timed("a gradient hook", self._recorder.gradient_ready, index, self._order - 1)
        else:
            # Called once per parameter: without a read it is too short to be worth timing.
            self._guard.call("a gradient hook", self._recorder.gradient_ready, index, self._order - 1)

    def _backward_begins(self) -> None:
        self._recorder.backward_begins()
        # Whatever happens below, the next backward pass must be noticed again.
        _when_backward_ends(self._backward_ends if self._recorder.sampling else self._backward_done)

    def _backward_ends(self) -> None:
        # Callbacks run in the order in which they were queued. DDP queues its own with its last gradient, so this
        # first one runs before reduced gradients are written back, and one queued from here runs after that.
        self._timed("reading local gradients", self._recorder.backward_ends)
        self._guard.call("the end of backward", _when_backward_ends, self._backward_ended)

    def _backward_ended(self) -> None:
        self._timed("reading reduced gradients", self._recorder.backward_ended)
        self._backward_done()

    def _backward_done(self) -> None:
        self._backward_seen = False

    def _update_begins(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self.active:
            self._backward_seen = False
            self._timed("an optimizer hook", self._recorder.update_begins, optimizer)

    def _updated(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self.active:
            self._timed("an optimizer hook", self._recorder.updated)

    def _timed(self, where: str, function: Callable[..., Any], *args: Any) -> None:
        began = time.thread_time()
        self._guard.call(where, function, *args)
        self.cpu_seconds += time.thread_time() - began


def _when_backward_ends(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass under way has computed all gradients.

    Torch has no public hook for that moment; DDP and FSDP themselves use this one.
    """
    Variable._execution_engine.queue_callback(callback)  # noqa: SLF001 - see above
