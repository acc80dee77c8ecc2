"""The interface of framework adapters: distribution of tensors over ranks, state of gradients, places for hooks.

Subclasses install gradient hooks through `on_gradient` and `on_accumulated`. Norms of shards are not combined in the
adapters: each rank publishes its own, and the view `tensor_global` of the store combines them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeGuard, TypeVar

import torch
from torch import nn

from rankscope_exporter.adapters.optimizer_wrapping import unwrapped
from rankscope_exporter.adapters.parameter_hooks import (
    ACCUMULATED,
    GRADIENT,
    Announced,
    CallbackHandle,
    Removable,
    TensorHook,
    remove_all,
)
from rankscope_exporter.adapters.placement import Layout, is_replicated_over, layout_of, replicas_of
from rankscope_exporter.model.parameter_names import NamedParameter, local_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkTraits:
    """The way in which a framework treats gradients and parameters: one value per adapter, fixed at attach()."""

    replicated: bool = False
    """Every rank holds a full copy of each parameter that is not sharded, and training keeps these copies equal."""
    reduces: bool = False
    """The framework reduces gradients over the ranks. If False, the training loop does."""
    reduces_each_micro_batch: bool | None = False
    """Each micro-batch is reduced separately, and no sum of this rank's own gradients is kept. None means that this
    depends on the training loop and is detected during training."""
    reduces_after_last_backward: bool = False
    """Gradients are reduced only after the last backward pass of a step. The adapter then calls `Hooking.reduced`."""
    waits_for_reductions: bool = False
    """The end of the backward pass waits for all reductions, so that their time can be measured."""
    local_until_backward_ends: bool = True
    """`.grad` still holds this rank's own gradient after the last hook of a backward pass. If False, a gradient must be
    read in its own hook, one tensor at a time."""
    interleaves_micro_batches: bool = False
    """The forward pass of a micro-batch may run before the backward pass of an earlier micro-batch."""
    optimizer_takes_copies: bool = False
    """The optimizer gets gradients in other tensors, or changes them without a change of the tensor's version."""
    updates_in_parts: bool = False
    """One update may consist of several optimizer steps, each for a part of the parameters."""
    parameters_are_local_parts: bool = False
    """A tensor-parallel parameter is a plain tensor that holds only this rank's part."""
    is_compiled: bool = False
    """`torch.compile` was called with the whole model, wrapper included."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor on this rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Return the shape and dtype of the part of `tensor` that is on this rank."""
        local = local_tensor(tensor)
        return cls(tuple(local.shape), local.dtype)


M = TypeVar("M", bound=nn.Module)


class WeakModule(Generic[M]):
    """An attribute that refers to a module without keeping it alive, because the training owns the module.

    Reading the attribute raises ReferenceError after the module was freed.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = f"_{name}_reference"

    def __get__(self, instance: object, owner: type | None = None) -> M:
        reference: weakref.ref[M] = instance.__dict__[self._key]
        module = reference()
        if module is None:
            raise ReferenceError("the attached model was freed: attach a new Monitor to the model that replaces it")
        return module

    def __set__(self, instance: object, module: M) -> None:
        instance.__dict__[self._key] = weakref.ref(module)


def is_temporarily_replaced(current: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether a plain tensor is in the place of a parameter, as during `torch.func.functional_call`."""
    return current is not None and not isinstance(current, nn.Parameter)


class Hooking(Protocol):
    """Services for a framework that hooks a model at every step, sampled or not."""

    def keep(self, handle: Removable) -> None:
        """Remove `handle` at detach()."""
        ...

    def always(self, where: str, function: Callable[..., None]) -> Callable[..., None]:
        """Return `function` as a hook that never raises into training and does nothing after detach, fork and copy."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which all hooks of the monitor do nothing."""
        ...

    def reduced(self) -> None:
        """Report that gradients have just been reduced outside of any backward pass."""
        ...


class GradientSource(Protocol):
    """The owner of a gradient: a parameter, or an object that a framework passes instead of it."""

    @property
    def grad(self) -> torch.Tensor | None:
        """Return this rank's own gradient, summed over all micro-batches of the step so far."""
        ...


class LazyGradient:
    """A gradient that is computed when a quantity reads it, such as a sum with earlier micro-batches."""

    __slots__ = ("_compute",)

    def __init__(self, compute: Callable[[], torch.Tensor | None]) -> None:
        self._compute = compute

    @property
    def grad(self) -> torch.Tensor | None:
        """Compute and return the gradient; None if there is none."""
        return self._compute()


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The state that an optimizer keeps for one parameter; its tensors are this rank's part."""

    optimizer: torch.optim.Optimizer
    group: Mapping[str, Any]
    """The parameter group, with its learning rate and other settings."""
    state: Mapping[str, Any]


class WrappedModel:
    """One model with the wrapper of its framework, and how its tensors are distributed over the ranks.

    The defaults describe a model without a wrapper that one process trains.
    """

    name: ClassVar[str]
    priority: ClassVar[int] = 0
    """If several adapters match a model, the adapter with the highest priority is used."""
    takes_chunks: ClassVar[bool] = False
    """True if `model` may be a list of the chunks of one model that this rank holds."""
    traits: FrameworkTraits = FrameworkTraits()

    model = WeakModule[nn.Module]()
    """The module that training calls for a forward of the whole model, with the wrapper of `torch.compile`."""
    root = WeakModule[Any]()
    """The wrapper of the framework, without the wrapper of `torch.compile`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = self.root = model
        self.pp_stage: int | None = None
        """Pipeline stage of the model, used to order anomalies; None without a pipeline."""
        self.chunk_numbers: Mapping[int, int] = {}
        """Chunk of each parameter and module, by id(); empty if this rank has a single chunk."""

    @classmethod
    def matches(cls, model: nn.Module) -> bool:  # noqa: ARG003 - a base class of adapters matches no model
        """Return whether this framework wraps `model`."""
        return False

    @property
    def module(self) -> nn.Module:
        """Return the user's own module, without the wrapper."""
        return self.model

    @property
    def chunks(self) -> Sequence[nn.Module]:
        """Return the modules that training calls for each micro-batch: the whole model, or its chunks on this rank."""
        return (self.model,)

    def chunk(self, module: nn.Module) -> int:
        """Return the position of `module` in `chunks`; 0 for any other module."""
        return next((number for number, chunk in enumerate(self.chunks) if chunk is module), 0)

    def vpp_stage(self, part: torch.Tensor | nn.Module) -> int | None:
        """Return the chunk that contains a parameter or module; None if this rank has a single chunk."""
        return self.chunk_numbers.get(id(part))

    def copies(self, world_size: int) -> int:
        """Return how many ranks compute gradients of the same elements from different data."""
        return world_size

    def layout(self, parameter: torch.Tensor) -> Layout:
        """Return how a parameter, its reduced gradient and its optimizer state are distributed over the ranks."""
        return layout_of(parameter, Layout("replica" if self.traits.replicated else "full"))

    def local_layout(self, parameter: torch.Tensor, world_size: int) -> Layout:
        """Return how this rank's own gradient of `parameter` relates to the gradients of other ranks."""
        layout = self.layout(parameter)
        return Layout("partial", layout.shard_group) if self.copies(world_size) > 1 else layout

    def spec(self, parameter: torch.Tensor) -> TensorSpec:
        """Return shape and dtype of the part of a parameter that this rank updates, and of its optimizer state."""
        return TensorSpec.of(parameter)

    def reduced_spec(self, parameter: torch.Tensor) -> TensorSpec:
        """Return shape and dtype of this rank's part of a reduced gradient."""
        return self.spec(parameter)

    def local_spec(self, parameter: torch.Tensor) -> TensorSpec:
        """Return shape and dtype of this rank's own gradient; the parameter may be gathered to compute it."""
        return self.spec(parameter)

    def is_same_on(self, parameter: torch.Tensor, ranks: Sequence[int]) -> bool:
        """Return whether parameter, reduced gradient and optimizer state are equal on all `ranks` by construction."""
        return is_replicated_over(parameter, ranks)

    def replicas(self, parameter: torch.Tensor) -> Sequence[int]:
        """Return the ranks, including this rank, that hold the same elements by construction.

        Empty if no other rank is known to hold them.
        """
        return replicas_of(parameter)

    def parameter(self, named: NamedParameter) -> nn.Parameter | None:
        """Return the parameter that was found as `named`, even if the model has moved it.

        None after the model replaced it, and while it cannot be reached, as during `torch.func.functional_call`.
        """
        return named.parameter

    def is_in_place(self, named: NamedParameter) -> bool:
        """Return whether the model still uses the parameter that was found as `named`.

        True also while `torch.func.functional_call` puts a plain tensor in its place for one forward pass.
        """
        current = named.current()
        return id(current) == named.identity or is_temporarily_replaced(current)


class Framework(WrappedModel):
    """The adapter of one wrapped model. A framework is added by adding a file with a subclass.

    The defaults describe a model without a wrapper. Its gradients are complete when backward ends.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.announced: Announced | None = None
        """Announces training forwards for a trainer that never calls the whole model; None if hooks see them."""

    # State of gradients.

    def reduces_in_backward(self) -> bool:
        """Return whether the current backward pass ends with gradients in `.grad` that are reduced over the ranks."""
        return False

    def holds_gradient(self, parameter: nn.Parameter) -> bool:
        """Return whether `parameter` still holds a gradient of an earlier backward pass."""
        return parameter.grad is not None

    def on_accumulated(self, parameter: nn.Parameter, hook: Callable[[GradientSource], None]) -> Removable:
        """Register a gradient hook that runs after each backward pass has added to this rank's own gradient."""
        return TensorHook(parameter, hook, table=ACCUMULATED)

    def on_gradient(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Removable:
        """Register a gradient hook that receives the gradient of one backward pass before it is accumulated."""
        return TensorHook(parameter, hook, table=GRADIENT)

    # The tensors that the optimizer updates.

    def optimizers(self, given: Sequence[Any]) -> tuple[torch.optim.Optimizer, ...]:
        """Return the torch optimizers inside of the objects that the script calls `step` on."""
        return tuple(unwrapped(item) for item in given)

    def updated_tensor(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the tensor that this rank updates for `parameter`; None if the current update does not include it."""
        return parameter

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the current gradient, reduced or clipped, of the tensor that this rank updates for `parameter`."""
        return parameter.grad

    def optimizer_states(
        self, parameters: Sequence[nn.Parameter | None], optimizers: Sequence[torch.optim.Optimizer]
    ) -> list[ParameterState | None]:
        """Return the state that `optimizers` keep for each parameter; None for a parameter without an optimizer."""
        groups = {
            id(item): (optimizer, group)
            for optimizer in reversed(optimizers)
            for group in optimizer.param_groups
            for item in group["params"]
        }
        states: list[ParameterState | None] = []
        for parameter in parameters:
            own = groups.get(id(parameter))
            state = {} if own is None or parameter is None else own[0].state.get(parameter, {})
            states.append(None if own is None else ParameterState(*own, state))
        return states

    def groups_of(self, optimizer: torch.optim.Optimizer) -> Sequence[Mapping[str, Any]]:
        """Return all parameter groups of an optimizer that is about to step."""
        groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
        return groups

    # Places for hooks.

    def install(self, hooking: Hooking) -> None:
        """Register the hooks that the adapter itself needs. Called once."""

    def on_update(
        self, optimizer: torch.optim.Optimizer, begins: Callable[..., Any], updated: Callable[..., None]
    ) -> list[Removable]:
        """Register hooks before and after each step of `optimizer`, with the signatures of torch's step hooks."""
        return [optimizer.register_step_pre_hook(begins), optimizer.register_step_post_hook(updated)]

    def on_forward(self, hook: Callable[..., None]) -> Removable:
        """Register `hook` before each forward of the model or of a chunk; it receives the module and its arguments."""
        if self.announced is not None:
            return self.announced.before(hook)
        handles = [chunk.register_forward_pre_hook(hook) for chunk in self.chunks]
        return CallbackHandle(functools.partial(remove_all, handles))

    def on_forward_end(self, hook: Callable[..., None]) -> Removable:
        """Register `hook` after each forward of the model or of a chunk, including a forward that raised."""
        if self.announced is not None:
            return self.announced.after(hook)
        handles = [chunk.register_forward_hook(hook, always_call=True) for chunk in self.chunks]
        return CallbackHandle(functools.partial(remove_all, handles))
