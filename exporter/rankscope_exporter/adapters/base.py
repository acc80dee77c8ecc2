"""The interface of framework adapters: distribution of tensors over ranks, gradients, and registration of hooks.

Subclasses install gradient hooks through `on_gradient` and `on_accumulated`. Norms of shards are not combined in the
adapters: each rank publishes its own norms, and the view `tensor_global` of the store combines them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from rankscope_exporter.adapters.hook_context import HookContext
from rankscope_exporter.adapters.optimizer_wrapping import OuterStep, inner_optimizers
from rankscope_exporter.adapters.parameter_hooks import Announced, CallbackHandle, Removable, TensorHook, remove_all
from rankscope_exporter.adapters.parameter_names import NamedParameter, TensorSpec, is_temporarily_replaced
from rankscope_exporter.adapters.placement import FULL, REPLICA, Layout, layout_of, replicas_of
from rankscope_exporter.adapters.torch_private import ACCUMULATED, GRADIENT


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkTraits:
    """Properties of a training framework: how it treats gradients and parameters. They do not change after attach()."""

    replicated: bool = False
    """True: every rank has a full copy of each parameter that is not sharded, and training keeps the copies equal."""
    reduces: bool = False
    """True: the framework reduces gradients over the ranks. False: the training loop does so."""
    reduces_each_micro_batch: bool | None = False
    """True: gradients are reduced after each micro-batch, and the framework keeps no sum of this rank's own gradients.

    None: this depends on the training loop, and is detected during training.
    """
    reduces_after_last_backward: bool = False
    """True: gradients are reduced only after the last backward pass of a step.

    The adapter reports the end of this reduction to the monitor by calling `HookContext.reduced`.
    """
    waits_for_reductions: bool = False
    """True: the end of the backward pass waits for all reductions, so that their duration can be measured."""
    local_until_backward_ends: bool = True
    """True: `.grad` still has this rank's own gradient after the last gradient hook of a backward pass.

    False: a gradient must be read in the gradient hook of its own tensor.
    """
    interleaves_micro_batches: bool = False
    """True: the forward pass of a micro-batch may run before the backward pass of an earlier micro-batch."""
    optimizer_takes_copies: bool = False
    """True: the optimizer gets copies of gradients, or gradients may change without a change of `Tensor._version`."""
    updates_in_parts: bool = False
    """True: an update may consist of several optimizer steps, each for a part of the parameters."""
    parameters_are_local_parts: bool = False
    """True: a tensor-parallel parameter is a plain tensor, not a DTensor, and has only this rank's part."""
    is_compiled: bool = False
    """True: `torch.compile` was called with the whole model, including the wrapper of the framework."""


M = TypeVar("M", bound=nn.Module)


class WeakModule(Generic[M]):
    """A descriptor for an attribute that refers to a module by a weak reference, because the training owns the module.

    Reading the attribute raises ReferenceError after the module was freed.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = f"_{name}_reference"

    def __get__(self, instance: object, owner: type | None = None) -> M:
        module: M | None = instance.__dict__[self._key]()
        if module is None:
            raise ReferenceError("the attached model was freed: attach a new Monitor to the model that replaces it")
        return module

    def __set__(self, instance: object, module: M) -> None:
        instance.__dict__[self._key] = weakref.ref(module)


class GradientSource(Protocol):
    """An object from which a gradient hook reads this rank's gradient of a parameter.

    It is the parameter itself, or an object that computes the gradient.
    """

    @property
    def grad(self) -> torch.Tensor | None:
        """Return this rank's own gradient of the parameter, summed over all micro-batches of the step so far."""


@dataclass(slots=True)
class LazyGradient:
    """A gradient that is computed when a quantity reads it, for example by adding the sum of earlier micro-batches."""

    compute: Callable[[], torch.Tensor | None]

    @property
    def grad(self) -> torch.Tensor | None:
        return self.compute()


class ParameterState(NamedTuple):
    """The state that an optimizer stores for one parameter. Its tensors are this rank's part of the state."""

    optimizer: torch.optim.Optimizer
    group: Mapping[str, Any]
    """The parameter group of the optimizer that contains the parameter, with its learning rate and other settings."""
    state: Mapping[str, Any]


class WrappedModel:
    """A model with the wrapper of its framework, and the distribution of its tensors over the ranks.

    The methods of this base class describe a model that has no wrapper and is trained by a single process. Subclasses
    override them.
    """

    priority: ClassVar[int] = 0
    """If several adapters match a model, the adapter with the highest priority is used."""
    takes_chunks: ClassVar[bool] = False
    """True if the adapter accepts a list of modules: the chunks of one model on this rank."""
    traits: FrameworkTraits = FrameworkTraits()

    model = WeakModule[nn.Module]()
    """The module that training calls for a forward pass of the whole model.

    It includes the wrapper of `torch.compile`, if there is one.
    """
    root = WeakModule[Any]()
    """The module with the wrapper of the framework, but without the wrapper of `torch.compile`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = self.root = model
        self.pp_stage: int | None = None
        """Number of the pipeline stage of the model, used to order anomalies; None without a pipeline."""
        self.chunk_numbers: Mapping[int, int] = {}
        """Mapping from the id() of each parameter and module to the number of the model chunk that contains it.

        Empty if this rank has a single chunk.
        """

    @classmethod
    def matches(cls, model: nn.Module) -> bool:  # noqa: ARG003 - used for a model that no other adapter matches
        """Return whether `model` has the wrapper of this framework."""
        return False

    @property
    def module(self) -> nn.Module:
        """Return the user's own module, without the wrapper of the framework."""
        return self.model

    def is_training(self) -> bool:
        """Return whether forward passes that begin now are those of a training, if gradients are enabled."""
        return self.module.training

    @property
    def chunks(self) -> Sequence[nn.Module]:
        """Return the modules that training calls for each micro-batch: the whole model, or its chunks on this rank."""
        return (self.model,)

    @property
    def hookable_chunks(self) -> list[nn.Module]:
        """Return the chunks on which torch registers hooks: not those that `torch.jit.script` has compiled."""
        return [chunk for chunk in self.chunks if not isinstance(chunk, torch.jit.ScriptModule)]

    def chunk(self, module: nn.Module) -> int:
        """Return the number of the model chunk that `module` is, counted from 0; 0 if it is not a chunk."""
        chunks = self.chunks
        return 0 if len(chunks) == 1 else next((i for i, chunk in enumerate(chunks) if chunk is module), 0)

    def vpp_stage(self, part: torch.Tensor | nn.Module) -> int | None:
        """Return the number of the model chunk that contains `part`; None if this rank has a single chunk."""
        return self.chunk_numbers.get(id(part))

    def copies(self, world_size: int) -> int:
        """Return the number of ranks that compute gradients of the same elements from different data."""
        return world_size

    def layout(self, parameter: torch.Tensor) -> Layout:
        """Return how a parameter, its reduced gradient and its optimizer state are distributed over the ranks."""
        return layout_of(parameter, REPLICA if self.traits.replicated else FULL)

    def local_layout(self, parameter: torch.Tensor, world_size: int) -> Layout:
        """Return the layout of this rank's own gradient: "partial" if several ranks compute gradients to be summed."""
        layout = self.layout(parameter)
        is_left_out = self.traits.replicated and layout == FULL
        return layout if is_left_out or self.copies(world_size) == 1 else Layout("partial", layout.shard_group)

    def spec(self, parameter: torch.Tensor) -> TensorSpec:
        """Return shape and dtype of the part of `parameter`, and of its optimizer state, that this rank updates."""
        return TensorSpec.of(parameter)

    def reduced_spec(self, parameter: torch.Tensor) -> TensorSpec:
        """Return shape and dtype of the reduced gradient of `parameter`: of the part of it that this rank has."""
        return self.spec(parameter)

    def local_spec(self, parameter: torch.Tensor) -> TensorSpec:
        """Return shape and dtype of this rank's own gradient, which may be that of a whole gathered parameter."""
        return self.spec(parameter)

    def has_plain_gradients(self, world_size: int) -> bool:
        """Return whether each gradient has the layout and spec of its parameter, before and after the reduction."""
        own, base = type(self), WrappedModel
        return (
            self.copies(world_size) == 1
            and own.local_layout is base.local_layout
            and own.local_spec is base.local_spec
            and own.reduced_spec is base.reduced_spec
        )

    def is_same_on(self, parameter: torch.Tensor, ranks: Sequence[int]) -> bool:
        """Return whether a parameter, its reduced gradient and state are equal on `ranks`, which include this rank."""
        return set(ranks) <= set(replicas_of(parameter))

    def replicas(self, parameter: torch.Tensor) -> Sequence[int]:
        """Return the ranks, with this one, that have the same elements by construction; empty if none is known."""
        return replicas_of(parameter)

    def parameter(self, named: NamedParameter) -> nn.Parameter | None:
        """Return the parameter of the model that `named` described when the monitor was attached.

        The framework may have stored the parameter outside of its module since. Return None if the model has replaced
        the parameter, or while it cannot be reached, as during `torch.func.functional_call`.
        """
        return named.parameter

    def is_in_place(self, named: NamedParameter) -> bool:
        """Return whether the model uses the parameter, also while `functional_call` replaces it for one pass."""
        current = named.current()
        return id(current) == named.identity or is_temporarily_replaced(current)


class Framework(WrappedModel):
    """The adapter of one wrapped model.

    To support another framework, add a file with a subclass of this class to the folder `adapters`. The methods of this
    base class describe a model without a wrapper. The gradients of such a model are complete when the backward pass
    ends.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.announced: Announced | None = None
        """Object by which a trainer reports forward passes to the monitor, if the trainer never calls the whole model.

        None if hooks detect the forward passes.
        """
        self.unknown_optimizers: list[str] = []
        """Types of given optimizers in which no torch optimizer was found."""
        self._outer_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, OuterStep] = weakref.WeakKeyDictionary()

    # State of gradients.

    def reduces_in_backward(self) -> bool:
        """Return whether gradients in `.grad` are reduced over the ranks at the end of the current backward pass."""
        return False

    def holds_gradient(self, parameter: nn.Parameter) -> bool:
        """Return whether `parameter` still holds a gradient of an earlier backward pass."""
        return parameter.grad is not None

    def on_accumulated(self, parameter: nn.Parameter, hook: Callable[[GradientSource], None]) -> Removable:
        """Register `hook`, called after a gradient was added to this rank's own gradient of `parameter`."""
        return TensorHook(parameter, hook, table=ACCUMULATED)

    def on_gradient(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Removable:
        """Register `hook`, which receives the gradient of `parameter` in one backward pass before it is accumulated."""
        return TensorHook(parameter, hook, table=GRADIENT)

    # The tensors that the optimizer updates.

    def optimizers(self, given: Sequence[Any]) -> tuple[torch.optim.Optimizer, ...]:
        """Return the torch optimizers in `given`; its elements are the objects whose `step` a script calls."""
        found: dict[torch.optim.Optimizer, None] = {}
        for item in given:
            inner = inner_optimizers(item)
            if not inner:
                self.unknown_optimizers.append(type(item).__name__)
            elif inner != [item]:
                with contextlib.suppress(TypeError):  # an object with __slots__: the update ends with the inner step
                    self._outer_steps.update(dict.fromkeys(inner, OuterStep(item)))
            found.update(dict.fromkeys(inner))
        return tuple(found)

    def updated_tensors(self, parameters: Sequence[nn.Parameter | None]) -> Sequence[torch.Tensor | None]:
        """Return the tensor (a copy or part) that this rank updates of each parameter; None: not in this update."""
        return parameters

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the present gradient of the tensor that this rank updates: reduced, and clipped by now or not."""
        return parameter.grad

    def optimizer_states(
        self, parameters: Sequence[nn.Parameter | None], optimizers: Sequence[torch.optim.Optimizer]
    ) -> list[ParameterState | None]:
        """Return the state that `optimizers` store for each parameter; None for a parameter without an optimizer."""
        groups: dict[int, tuple[torch.optim.Optimizer, Mapping[str, Any]]] = {}
        for optimizer in reversed(optimizers):
            for group in optimizer.param_groups:
                groups.update(zip(map(id, group["params"]), itertools.repeat((optimizer, group))))
        states: list[ParameterState | None] = []
        for parameter in parameters:
            own = groups.get(id(parameter))
            state = {} if own is None or parameter is None else own[0].state.get(parameter, {})
            states.append(None if own is None else ParameterState(*own, state))
        return states

    def groups_of(self, optimizer: torch.optim.Optimizer) -> Sequence[Mapping[str, Any]]:
        """Return the parameter groups of an optimizer that is about to step."""
        return optimizer.param_groups

    # Places for hooks.

    def install(self, hooking: HookContext) -> None:
        """Register the hooks that the adapter itself needs. Called once, at attach."""

    def on_update(
        self, optimizer: torch.optim.Optimizer, begins: Callable[..., Any], updated: Callable[..., None]
    ) -> list[Removable]:
        """Register hooks before and after each step of `optimizer`, with the signatures of torch's step hooks."""
        outer, handles = self._outer_steps.get(optimizer), []
        if outer is not None:
            updated, handles = outer.postponed(updated), outer.install()
        return [*handles, optimizer.register_step_pre_hook(begins), optimizer.register_step_post_hook(updated)]

    def on_forward(self, hook: Callable[..., None]) -> Removable:
        """Register `hook`, which gets module, args and kwargs, before each forward pass of the model or of a chunk."""
        if self.announced is not None:
            return self.announced.before.register(hook)
        handles = [chunk.register_forward_pre_hook(hook, with_kwargs=True) for chunk in self.hookable_chunks]
        return CallbackHandle(functools.partial(remove_all, handles))

    def on_forward_end(self, hook: Callable[..., None]) -> Removable:
        """Register `hook` after each forward pass of the model or of a chunk, also if the forward pass raises."""
        if self.announced is not None:
            return self.announced.after.register(hook)
        handles = [chunk.register_forward_hook(hook, always_call=True) for chunk in self.hookable_chunks]
        return CallbackHandle(functools.partial(remove_all, handles))
