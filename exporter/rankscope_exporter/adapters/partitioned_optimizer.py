"""Frameworks whose optimizer is not given the model's parameters, but copies or parts of them, once per step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import nn

from rankscope_exporter.adapters.base import Framework, GradientSource, Hooking, ParameterState, Removable, TensorSpec
from rankscope_exporter.adapters.optimizer_wrapping import PatchedMethod
from rankscope_exporter.base.tracing import is_dynamo_compiling, uncompiled

FROZEN: Final = -1


@dataclass(frozen=True, slots=True)
class ParameterPartition:
    """What this rank updates of a parameter: `count` elements, from `start`, of a `tensor` that the optimizer steps."""

    tensor: torch.Tensor
    optimizer: torch.optim.Optimizer
    group: int
    """Position of the parameter group in the optimizer; FROZEN of what no optimizer steps."""
    start: int = 0
    count: int | None = None
    """None is all of it, in its own shape."""

    def of(self, whole: torch.Tensor | None) -> torch.Tensor | None:
        """Return this part of a tensor that lies as `tensor` does; None of one that is not there."""
        if whole is None or self.count is None:
            return whole
        if whole.numel() < self.start + self.count:  # moved elsewhere for the moment
            return None
        return whole.detach().view(-1).narrow(0, self.start, self.count)

    @property
    def form(self) -> TensorSpec:
        """Return shape and type."""
        return TensorSpec(tuple(self.tensor.shape) if self.count is None else (self.count,), self.tensor.dtype)

    def kept(self, groups: Sequence[Mapping[str, Any]]) -> ParameterState:
        """Return this part of what the optimizer keeps; `groups` are all of its parameter groups."""
        state = self.optimizer.state.get(self.tensor, {})
        own = {key: self.of(value) if _lies_as(value, self.tensor) else value for key, value in state.items()}
        return ParameterState(self.optimizer, groups[self.group] if 0 <= self.group < len(groups) else {}, own)


class PartitionedOptimizer(Framework):
    """One method of the script's optimizer or engine makes the whole update, from reduced gradients on.

    It is replaced on the object until detach(), by one that says when: before it gradients are reduced, not unscaled
    and not clipped. Each step of an inner optimizer in there begins the update of what is in its parameter groups at
    that moment, and when the method returns all is updated. Without any, the step was skipped.

    A subclass fills `parts` and says where reduced gradients stand.
    """

    name: ClassVar[str] = "parts"
    priority: ClassVar[int] = -3  # never matches

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.parts: dict[int, ParameterPartition | None] = {}
        """By identity of the parameter; None for one that is divided, with nothing for this rank."""
        self._groups: dict[int, Sequence[Mapping[str, Any]]] = {}  # by identity of the optimizer
        self._moment = _IDLE
        self._now: frozenset[int] = frozenset()  # identities of the tensors that an inner optimizer is about to step
        self._updated: list[Callable[[], None]] = []
        self._stepped: dict[int, Callable[[], None]] = {}
        self._seen: set[int] = set()  # identities of the parameters that got a gradient since the last update

    @classmethod
    def matches(cls, model: nn.Module) -> bool:  # noqa: ARG003 - the signature
        """Return False: the subclasses match."""
        return False

    def reduced_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the reduced gradient of what this rank updates of `parameter`, as it stands before the update."""
        raise NotImplementedError

    def earlier_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the sum of this rank's own gradients of earlier micro-batches; None where there is none."""
        raise NotImplementedError

    def local_sum(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the sum of this rank's own gradients, of which `gradient` is the last; None where none is kept."""
        earlier = self.earlier_gradient(parameter)
        return gradient if earlier is None else earlier + gradient.to(earlier.dtype)

    # When gradients are what.

    @property
    def scatters(self) -> bool:
        """Return whether each backward pass leaves reduced parts, and no sum of this rank's own gradients."""
        return False

    @property
    def reduces_each_micro_batch(self) -> bool | None:
        """Return None where it does so if there are several."""
        return None if self.scatters else False

    @property
    def local_until_backward_ends(self) -> bool:
        """Return False: each gradient is read in its hook."""
        return False

    @property
    def reduces(self) -> bool:
        """Return True."""
        return True

    @property
    def reduces_after_last_backward(self) -> bool:
        """Return True: when the update begins, reduced gradients are complete."""
        return True

    def reduces_in_backward(self) -> bool:
        """Return whether the update begins."""
        return self._moment is _REDUCED

    def holds_gradient(self, parameter: nn.Parameter) -> bool:  # noqa: ARG002 - it is the same for all
        """Return whether there was a backward pass since the last update, made or skipped."""
        return bool(self._seen)

    # What the optimizer works on.

    @property
    def optimizer_takes_copies(self) -> bool:
        """Return True."""
        return True

    @property
    def updates_in_parts(self) -> bool:
        """Return True."""
        return True

    def form(self, parameter: torch.Tensor) -> TensorSpec:
        """Return the form of the part."""
        part = self.parts.get(id(parameter), _WHOLE)
        if part is _WHOLE:
            return super().form(parameter)
        return part.form if isinstance(part, ParameterPartition) else TensorSpec((0,), parameter.dtype)

    def held(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the part that the optimizer steps."""
        part = self.parts.get(id(parameter), _WHOLE)
        if part is _WHOLE:
            return parameter
        return part.of(part.tensor) if isinstance(part, ParameterPartition) and self._is_due(part) else None

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the reduced gradient when the update begins, and what the optimizer is given when it steps."""
        part = self.parts.get(id(parameter))
        if self._moment is _REDUCED:
            return self.reduced_gradient(parameter)
        if self._moment is _STEPPING and isinstance(part, ParameterPartition) and self._is_due(part):
            return part.of(part.tensor.grad)
        return None

    def kept(
        self,
        parameters: Sequence[nn.Parameter | None],
        optimizers: Sequence[torch.optim.Optimizer],  # noqa: ARG002 - a part knows its own
    ) -> list[ParameterState | None]:
        """Return the parts of what the optimizers keep."""
        parts = (self.parts.get(id(parameter)) for parameter in parameters)
        return [None if part is None else part.kept(self.groups_of(part.optimizer)) for part in parts]

    def groups_of(self, optimizer: torch.optim.Optimizer) -> Sequence[Mapping[str, Any]]:
        """Return the groups as they were before the update: some frameworks show the optimizer one at a time."""
        return self._groups.get(id(optimizer), optimizer.param_groups)

    def _is_due(self, part: ParameterPartition) -> bool:
        return self._moment is not _STEPPING or part.group == FROZEN or id(part.tensor) in self._now

    # Where hooks belong.

    def on_accumulated(self, parameter: nn.Parameter, hook: Callable[[GradientSource], None]) -> Removable:
        """Hook the gradient on its way to where the framework collects it."""

        @uncompiled
        def passing(gradient: torch.Tensor) -> None:
            if is_dynamo_compiling():  # first, see `Entry`
                return
            again = id(parameter) in self._seen
            self._seen.add(id(parameter))
            summed = not (again and self.scatters)
            hook(_Passing(lambda: self.local_sum(parameter, gradient) if summed else None))

        return super().on_gradient(parameter, passing)

    def on_update(
        self, optimizer: torch.optim.Optimizer, begins: Callable[..., Any], updated: Callable[..., None]
    ) -> list[Removable]:
        """Hook each step of the inner optimizer; `updated` is called when the whole update is done."""

        @uncompiled
        def part_begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if is_dynamo_compiling():  # first, see `Entry`
                return
            if self._moment is _IDLE:  # not from within the update that is watched
                return
            self._moment = _STEPPING
            self._now = frozenset(id(item) for group in optimizer.param_groups for item in group["params"])
            self._stepped[id(optimizer)] = lambda: updated(optimizer, args, kwargs)
            begins(optimizer, args, kwargs)

        return [optimizer.register_step_pre_hook(part_begins)]

    def watch(self, owner: Any, method: str, hooking: Hooking) -> None:
        """Have the update that `owner.method` makes be seen."""
        before = hooking.always("the beginning of an update", self._update_begins)
        after = hooking.always("the end of an update", self._update_ended)

        def watched(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before(hooking)
            try:
                result = original(*args, **kwargs)
                after()
                return result
            finally:
                self._moment, self._now = _IDLE, frozenset()
                self._stepped.clear()
                self._seen.clear()

        hooking.keep(PatchedMethod(owner, method, watched))

    @functools.cached_property
    def _inner(self) -> dict[int, torch.optim.Optimizer]:
        return {id(part.optimizer): part.optimizer for part in self.parts.values() if part is not None}

    def _update_begins(self, hooking: Hooking) -> None:
        self._groups = {number: list(optimizer.param_groups) for number, optimizer in self._inner.items()}
        self._moment = _REDUCED
        hooking.reduced()

    def _update_ended(self) -> None:
        self._moment = _UPDATED
        for updated in self._stepped.values():
            updated()


_IDLE: Final = "idle"
_REDUCED: Final = "reduced"
_STEPPING: Final = "stepping"
_UPDATED: Final = "updated"
_WHOLE: Final = object()


class _Passing:
    """A gradient on its way, summed up only where somebody asks."""

    def __init__(self, local_sum: Callable[[], torch.Tensor | None]) -> None:
        self._local_sum = local_sum

    @property
    def grad(self) -> torch.Tensor | None:
        return self._local_sum()


def _lies_as(value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape
