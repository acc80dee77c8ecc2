"""What the quantities must know of the framework around a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeGuard, TypeVar

import torch
from torch import nn

from rankscope_exporter.adapters.optimizer_wrapping import unwrapped
from rankscope_exporter.adapters.parameter_hooks import ACCUMULATED, GRADIENT, Announced, Removable, TensorHook
from rankscope_exporter.adapters.placement import Layout, is_replicated_over, layout_of, replicas_of
from rankscope_exporter.model.parameter_names import NamedParameter, entry, found_in_place, local_tensor

__all__ = ["Framework", "GradientSource", "Hooking", "ParameterState", "Removable", "TensorSpec", "remove_all"]


def remove_all(handles: Iterable[Removable]) -> None:
    """Remove every handle in order; an error of one is raised only when all others have been removed."""
    with ExitStack() as stack:  # calls back in reverse order, whatever is raised
        for handle in reversed(list(handles)):
            stack.callback(handle.remove)


M = TypeVar("M", bound=nn.Module)


def alive(reference: weakref.ref[M]) -> M:
    """Return the module of a reference. Raises ReferenceError once it is gone."""
    module = reference()
    if module is None:
        raise ReferenceError("the model that was attached is gone: attach a new Monitor to the next one")
    return module


def is_stood_in_for(current: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether a plain tensor replaces a parameter for the moment, as in `torch.func.functional_call`."""
    return current is not None and not isinstance(current, nn.Parameter)


class HandleGroup:
    """Several hooks as one."""

    def __init__(self, handles: Sequence[Removable]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Take all of them away."""
        remove_all(self._handles)


class Hooking(Protocol):
    """What a framework needs to hook a model at all times, not only where something is measured."""

    def keep(self, handle: Removable) -> None:
        """Remove `handle` at detach()."""
        ...

    def always(self, where: str, function: Callable[..., None]) -> Callable[..., None]:
        """Return `function` as a hook that never raises into training and is inert after detach, fork and copy."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Let all hooks see nothing of what runs inside."""
        ...

    def reduced(self) -> None:
        """Say that gradients have just been reduced, outside of any backward pass."""
        ...


class GradientSource(Protocol):
    """Where a gradient stands: a parameter, or what a framework puts in its place."""

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's own gradient over all micro-batches of the step so far."""
        ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of a tensor on this rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ParameterState:
    """What an optimizer keeps for one parameter: tensors of its state as they lie on this rank."""

    optimizer: torch.optim.Optimizer
    group: Mapping[str, Any]
    state: Mapping[str, Any]


class Framework:
    """One wrapped model: where its gradients stand at which moment, and how its tensors lie on the ranks.

    The defaults describe a model that nothing wraps, trained by one process.
    """

    name: ClassVar[str]
    priority: ClassVar[int] = 0
    takes_chunks: ClassVar[bool] = False
    """Whether `model` may be a list of the parts that this rank has of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.announced: Announced | None = None
        """Who says when a training forward begins, where training never calls the whole model."""
        self.pp_stage: int | None = None
        """Which stage of a pipeline the model is, by which anomalies are put in order; None for no part of one."""

    @property
    def model(self) -> nn.Module:
        """What training calls: its forward is the forward of the whole model.

        The training owns it, and the monitor does not keep it alive. Raises ReferenceError once it is gone.
        """
        return alive(self._model)

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Return whether `model` is wrapped by this framework."""
        raise NotImplementedError

    @property
    def module(self) -> nn.Module:
        """Return the user's own module, without the wrapper."""
        return self.model

    # How tensors lie on the ranks.

    @property
    def replicated(self) -> bool:
        """Return whether every rank holds a full copy of what is not sharded, that training keeps equal."""
        return False

    def copies(self, world_size: int) -> int:
        """Return how many ranks compute gradients of the same elements from different data."""
        return world_size

    def layout(self, parameter: torch.Tensor) -> Layout:
        """Return how a parameter, its reduced gradient and its optimizer state lie on the ranks."""
        return layout_of(parameter, Layout("replica" if self.replicated else "full"))

    def vpp_stage(self, part: torch.Tensor | nn.Module) -> int | None:
        """Return which chunk of the model on this rank has a parameter or module; None where there is one only."""
        return self.numbers_of_chunks.get(id(part))

    @property
    def numbers_of_chunks(self) -> Mapping[int, int]:
        """Return the chunk of each parameter and module by identity; nothing where there is one only."""
        return {}

    def form(self, parameter: torch.Tensor) -> TensorSpec:
        """Return the form of what this rank updates of a parameter, and of its optimizer state."""
        local = local_tensor(parameter)
        return TensorSpec(tuple(local.shape), local.dtype)

    def reduced_spec(self, parameter: torch.Tensor) -> TensorSpec:
        """Return the form of this rank's part of a reduced gradient."""
        return self.form(parameter)

    def local_layout(self, parameter: torch.Tensor, world_size: int) -> Layout:
        """Return how this rank's own gradient of `parameter` relates to those of the others."""
        layout = self.layout(parameter)
        return Layout("partial", layout.shard_group) if self.copies(world_size) > 1 else layout

    def local_spec(self, parameter: torch.Tensor) -> TensorSpec | None:  # noqa: ARG002 - for frameworks that gather it
        """Return the form of this rank's own gradient where it is not that of the parameter here."""
        return None

    def is_same_on(self, parameter: torch.Tensor, ranks: Sequence[int]) -> bool:
        """Return whether parameter, reduced gradient and optimizer state are, by construction, the same on `ranks`."""
        return is_replicated_over(parameter, ranks)

    def replicas(self, parameter: torch.Tensor) -> Sequence[int]:
        """Return the ranks, this one among them, that by construction hold the same elements as this rank does.

        Empty where no other rank is known to.
        """
        return replicas_of(parameter)

    def is_in_place(self, named: NamedParameter) -> bool:
        """Return whether the model still uses this very parameter.

        A plain tensor in its place is there for one forward pass: `torch.func.functional_call` has put it there.
        """
        current = named.current()
        return id(current) == named.identity or is_stood_in_for(current)

    def parameter(self, named: NamedParameter) -> nn.Parameter | None:
        """Return the parameter that `named` was found as, wherever it is now; None once the model has replaced it.

        Also None while it cannot be reached, as in `torch.func.functional_call`.
        """
        return named.parameter

    def found(self, parameters: Sequence[NamedParameter]) -> list[nn.Parameter | None]:
        """Return what `parameter` returns of each of them. Called several times in a measured step."""
        if type(self).parameter is Framework.parameter:
            return found_in_place(parameters)
        return [self.parameter(named) for named in parameters]

    # When gradients are what.

    @property
    def local_until_backward_ends(self) -> bool:
        """Return whether `.grad` still holds this rank's own gradient after the last hook of a backward pass.

        If not, a gradient must be read in its own hook, one tensor at a time.
        """
        return True

    @property
    def is_compiled(self) -> bool:
        """Return whether the model as a whole, wrapper included, was given to `torch.compile`."""
        return entry(self.model._modules, "_orig_mod") is not None  # noqa: SLF001 - `__getattr__` may be the user's

    @property
    def interleaves_micro_batches(self) -> bool:
        """Return whether a later micro-batch may go forward before an earlier one has gone backward."""
        return False

    @property
    def reduces(self) -> bool:
        """Return whether the framework itself makes the reduced gradients, rather than the training loop."""
        return False

    @property
    def reduces_after_last_backward(self) -> bool:
        """Return whether gradients are reduced only after the last backward pass, and `Hooking.reduced` says when."""
        return False

    def reduces_in_backward(self) -> bool:
        """Return whether the backward pass that is under way ends with `.grad` reduced over the ranks."""
        return False

    @property
    def reduces_each_micro_batch(self) -> bool | None:
        """Return whether several micro-batches are reduced one by one, with no sum of this rank's own; None: who knows.

        Then it shows when they are.
        """
        return False

    def holds_gradient(self, parameter: nn.Parameter) -> bool:
        """Return whether a gradient that `parameter` got in an earlier backward pass has not been dropped since."""
        return parameter.grad is not None

    # What the optimizer works on.

    def optimizers(self, given: Sequence[Any]) -> tuple[torch.optim.Optimizer, ...]:
        """Return the torch optimizers inside of what the script steps."""
        return tuple(unwrapped(item) for item in given)

    @property
    def optimizer_takes_copies(self) -> bool:
        """Return whether the optimizer gets gradients in other tensors, or changed without a trace in the tensor."""
        return False

    @property
    def updates_in_parts(self) -> bool:
        """Return whether an update may begin several times, each time for the parameters that have a value then."""
        return False

    def held(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return what this rank updates of `parameter`; None where it has no part in the update that begins."""
        return parameter

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return what stands there of the gradient, reduced or clipped, for what this rank updates of `parameter`."""
        return parameter.grad

    def kept(
        self, parameters: Sequence[nn.Parameter | None], optimizers: Sequence[torch.optim.Optimizer]
    ) -> list[ParameterState | None]:
        """Return what the optimizers keep for each of `parameters`; None where there is none."""
        groups = {
            id(item): (optimizer, group)
            for optimizer in reversed(optimizers)
            for group in optimizer.param_groups
            for item in group["params"]
        }
        found = []
        for parameter in parameters:
            own = groups.get(id(parameter))
            state = {} if own is None or parameter is None else own[0].state.get(parameter, {})
            found.append(None if own is None else ParameterState(*own, state))
        return found

    def groups_of(self, optimizer: torch.optim.Optimizer) -> Sequence[Mapping[str, Any]]:
        """Return all parameter groups of an optimizer that is about to step."""
        groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
        return groups

    # Where hooks belong.

    @property
    def chunks(self) -> Sequence[nn.Module]:
        """Return what training calls for each micro-batch: the whole model, or one after another its parts here."""
        return (self.model,)

    def chunk(self, module: nn.Module) -> int:
        """Return which of `chunks` the module is that a hook was called with."""
        return next((number for number, chunk in enumerate(self.chunks) if chunk is module), 0)

    def on_update(
        self, optimizer: torch.optim.Optimizer, begins: Callable[..., Any], updated: Callable[..., None]
    ) -> list[Removable]:
        """Have hooks called around each step of `optimizer`, with the signatures that torch gives step hooks."""
        return [optimizer.register_step_pre_hook(begins), optimizer.register_step_post_hook(updated)]

    def install(self, hooking: Hooking) -> None:
        """Register hooks that the framework itself needs; called once."""

    def on_forward(self, hook: Callable[..., None]) -> Removable:
        """Have `hook` called with the model, or a chunk of it, and its arguments, before a forward of that."""
        if self.announced is not None:
            return self.announced.before(hook)
        return HandleGroup([chunk.register_forward_pre_hook(hook) for chunk in self.chunks])

    def on_forward_end(self, hook: Callable[..., None]) -> Removable:
        """Have `hook` called after a forward of the model, or of a chunk of it, also of one that raised."""
        if self.announced is not None:
            return self.announced.after(hook)
        return HandleGroup([chunk.register_forward_hook(hook, always_call=True) for chunk in self.chunks])

    def on_accumulated(self, parameter: nn.Parameter, hook: Callable[[GradientSource], None]) -> Removable:
        """Have `hook` called whenever a backward pass has added all it has to this rank's own gradient."""
        return TensorHook(parameter, hook, table=ACCUMULATED)

    def on_gradient(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Removable:
        """Have `hook` called with what one backward pass is about to add to this rank's own gradient."""
        return TensorHook(parameter, hook, table=GRADIENT)
