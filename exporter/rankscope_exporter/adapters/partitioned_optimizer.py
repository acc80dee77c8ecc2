"""Base class of adapters for frameworks in which one method call of the optimizer makes the whole update.

The optimizer of such a framework updates copies or parts of parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from rankscope_exporter.adapters.base import Framework, FrameworkTraits, GradientSource, LazyGradient, ParameterState
from rankscope_exporter.adapters.hook_context import Hook, HookContext
from rankscope_exporter.adapters.optimizer_wrapping import PatchedMethod
from rankscope_exporter.adapters.parameter_hooks import Removable
from rankscope_exporter.adapters.parameter_names import TensorSpec
from rankscope_exporter.adapters.tracing import is_dynamo_compiling, uncompiled

FROZEN: Final = -1


@dataclass(frozen=True, slots=True)
class ParameterPartition:
    """This rank's part of a parameter: `count` elements of `tensor` from `start` on. The optimizer steps `tensor`."""

    tensor: torch.Tensor
    optimizer: Any
    """The torch optimizer that steps the part; None if there is none."""
    group: int
    """Position of the part's parameter group in `optimizer.param_groups`.

    The constant FROZEN if no optimizer steps the parameter.
    """
    start: int = 0
    count: int | None = None
    """Number of elements of the part. None means all elements of `tensor`, in the shape of `tensor`."""

    def of(self, whole: torch.Tensor | None) -> torch.Tensor | None:
        """Return this rank's part of `whole`, which has the layout of the attribute `tensor`, for example its gradient.

        Return None if `whole` is None or is offloaded at present.
        """
        if whole is None or self.count is None:
            return whole
        if whole.numel() < self.start + self.count:  # offloaded for the moment
            return None
        return whole.detach().view(-1).narrow(0, self.start, self.count)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(tuple(self.tensor.shape) if self.count is None else (self.count,), self.tensor.dtype)

    def optimizer_state(self, groups: Sequence[Mapping[str, Any]]) -> ParameterState:
        """Return the optimizer state of this part of a parameter.

        `groups` are all parameter groups of the optimizer.
        """
        state = self.optimizer.state.get(self.tensor, {})
        own = {
            key: self.of(value) if isinstance(value, torch.Tensor) and value.shape == self.tensor.shape else value
            for key, value in state.items()
        }
        return ParameterState(self.optimizer, groups[self.group] if 0 <= self.group < len(groups) else {}, own)


_IDLE: Final = "idle"
_REDUCED: Final = "reduced"
_STEPPING: Final = "stepping"


class PartitionedOptimizer(Framework):
    """Adapter for frameworks in which one method of the optimizer or engine makes the whole update.

    Until detach(), this method is replaced by one that also reports the update. When the method is called, gradients
    are reduced, but not unscaled and not clipped. Each step of an inner optimizer begins the update of the tensors that
    are in the parameter groups of this inner optimizer at that time. When the method returns, all parameters are
    updated. If no inner optimizer stepped, the step was skipped.

    A subclass must fill the attribute `parts`, which has this rank's part of each parameter, and must implement the
    method that returns the reduced gradient of a part.
    """

    traits = FrameworkTraits(
        local_until_backward_ends=False,
        reduces=True,
        reduces_after_last_backward=True,
        optimizer_takes_copies=True,
        updates_in_parts=True,
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.parts: dict[int, ParameterPartition | None] = {}
        """This rank's part of each parameter, by id() of the parameter.

        None for a divided parameter of which this rank has no part.
        """
        self._groups: dict[int, Sequence[Mapping[str, Any]]] = {}  # by id() of the optimizer
        self._phase = _IDLE
        self._stepping: frozenset[int] = frozenset()  # id() of the tensors that an inner optimizer is about to step
        self._updated: dict[int, Callable[[], None]] = {}  # by id() of an optimizer that stepped: the hook to call
        self._with_gradient: set[int] = set()  # id() of the parameters with a gradient since the last update

    def reduced_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the reduced gradient of this rank's part before the update; None without gradient or part."""
        raise NotImplementedError

    def earlier_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the sum of this rank's own gradients of earlier micro-batches of the step, if there is one."""
        raise NotImplementedError

    def local_sum(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the sum of this rank's gradients over the micro-batches so far; `gradient` is the latest."""
        earlier = self.earlier_gradient(parameter)
        return gradient if earlier is None else earlier + gradient.to(earlier.dtype)

    # State of gradients.

    def reduces_in_backward(self) -> bool:
        # From the beginning of an update to the first step of a torch optimizer, the gradients that the framework
        # stores are reduced.
        return self._phase is _REDUCED

    def holds_gradient(self, parameter: nn.Parameter) -> bool:  # noqa: ARG002 - it is the same for all
        # An update that was skipped counts too: since it, no backward pass has run.
        return bool(self._with_gradient)

    def on_accumulated(self, parameter: nn.Parameter, hook: Callable[[GradientSource], None]) -> Removable:
        keeps_sum = self.traits.reduces_each_micro_batch is False

        @uncompiled
        def call(gradient: torch.Tensor) -> None:
            if is_dynamo_compiling():  # first, see `Hook`
                return
            is_first = id(parameter) not in self._with_gradient
            self._with_gradient.add(id(parameter))
            has_sum = is_first or keeps_sum
            hook(LazyGradient(lambda: self.local_sum(parameter, gradient) if has_sum else None))

        return super().on_gradient(parameter, call)

    # The tensors that the optimizer updates.

    def spec(self, parameter: torch.Tensor) -> TensorSpec:
        part = self._part(parameter)
        return TensorSpec((0,), parameter.dtype) if part is None else part.spec

    def updated_tensors(self, parameters: Sequence[nn.Parameter | None]) -> list[torch.Tensor | None]:
        return [None if parameter is None else self._updated_part(parameter) for parameter in parameters]

    def _updated_part(self, parameter: nn.Parameter) -> torch.Tensor | None:
        part = self._part(parameter)
        return None if part is None or not self._is_updated_now(part) else part.of(part.tensor)

    def _part(self, parameter: torch.Tensor) -> ParameterPartition | None:
        """Return this rank's part of a parameter; one that is not in `parts` is whole, and no optimizer steps it."""
        return self.parts.get(id(parameter), ParameterPartition(parameter, None, FROZEN))

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        # The gradient of this rank's part of `parameter`. It is reduced when the update begins, and also clipped when
        # the optimizer steps. Return None at any other time.
        part = self.parts.get(id(parameter))
        if self._phase is _REDUCED:
            return self.reduced_gradient(parameter)
        if self._phase is _STEPPING and part is not None and self._is_updated_now(part):
            return part.of(part.tensor.grad)
        return None

    def optimizer_states(
        self,
        parameters: Sequence[nn.Parameter | None],
        optimizers: Sequence[torch.optim.Optimizer],  # noqa: ARG002 - each part refers to its optimizer
    ) -> list[ParameterState | None]:
        # The state is None for a parameter of which this rank has no part.
        parts = (self.parts.get(id(parameter)) for parameter in parameters)
        return [None if part is None else part.optimizer_state(self.groups_of(part.optimizer)) for part in parts]

    def groups_of(self, optimizer: torch.optim.Optimizer) -> Sequence[Mapping[str, Any]]:
        # During the update, some frameworks give the optimizer one group after the other.
        return self._groups.get(id(optimizer), optimizer.param_groups)

    def _is_updated_now(self, part: ParameterPartition) -> bool:
        return self._phase is not _STEPPING or part.group == FROZEN or id(part.tensor) in self._stepping

    # Places for hooks.

    def on_update(
        self, optimizer: torch.optim.Optimizer, begins: Callable[..., Any], updated: Callable[..., None]
    ) -> list[Removable]:
        # `begins` is called before each step of this optimizer, and `updated` at the end of the framework's whole
        # update.

        @uncompiled
        def part_begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if is_dynamo_compiling():  # first, see `Hook`
                return
            if self._phase is _IDLE:  # a step outside of the watched method
                return
            self._phase = _STEPPING
            self._stepping = frozenset(id(item) for group in optimizer.param_groups for item in group["params"])
            self._updated[id(optimizer)] = lambda: updated(optimizer, args, kwargs)
            begins(optimizer, args, kwargs)

        return [optimizer.register_step_pre_hook(part_begins)]

    def watch(self, owner: Any, method: str, hooking: HookContext) -> None:
        """Report each call of the method `method` of `owner` to the monitor, until detach().

        A call is one update of the parameters. Its beginning and its end are reported separately.
        """
        before = Hook(hooking, "reporting the beginning of an update", self._update_begins)
        after = Hook(hooking, "reporting the end of an update", self._update_ended)

        def watched(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before(hooking)
            try:
                result = original(*args, **kwargs)
                after()
                return result
            finally:
                self._phase, self._stepping = _IDLE, frozenset()
                self._updated.clear()
                self._with_gradient.clear()

        hooking.keep(PatchedMethod(owner, method, watched))

    @functools.cached_property
    def _inner(self) -> dict[int, torch.optim.Optimizer]:
        return {id(part.optimizer): part.optimizer for part in self.parts.values() if part is not None}

    def _update_begins(self, hooking: HookContext) -> None:
        self._groups = {number: list(optimizer.param_groups) for number, optimizer in self._inner.items()}
        self._phase = _REDUCED
        hooking.reduced()

    def _update_ended(self) -> None:
        self._phase = _IDLE
        for updated in self._updated.values():
            updated()
