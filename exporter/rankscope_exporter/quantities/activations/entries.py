"""Plan entries of activations, by call, module and tensor; caches of tensors that were read.

Calls are numbered within a micro-batch. Checkpointing computes a part of the forward pass a second time, inside the
backward pass. In the non-reentrant mode, the first computation makes the autograd graph and the second computation is
discarded. In the reentrant mode, the first computation runs without gradients, so only tensors of the second
computation get gradients. The rows of these gradients must get the names of the module calls in the first computation.

If several modules pass on the same tensor, the tensor is measured once. After a tensor was freed, another tensor may
get the same id(), so the cache entry of a tensor is deleted with the tensor. The caches do not keep a tensor alive for
longer than the training does. Leaf tensors are an exception: they are kept until the next call of a module.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import torch
from torch import nn

from rankscope_contract.model.kinds import Kind
from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.adapters.placement import placement_of
from rankscope_exporter.model.parameter_names import local_tensor
from rankscope_exporter.statistics.tensor_access import dtype_name


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of one module.

    In a micro-batch, `seq` is the number of earlier calls of the module; None for the first call.
    """

    module: str
    micro_step: int
    seq: int | None = None
    pointer: int = 0  # address of the first argument, which checkpointing keeps


class Calls:
    """The module calls of one step, in order. Finds the original call when checkpointing computes a call again."""

    def __init__(self) -> None:
        self.called: set[str] = set()
        self._counts: dict[tuple[str, int], int] = {}
        self._waiting: list[ModuleCall | None] = []  # in order: calls without gradients; None after a match
        self._next: int | None = None

    def begins(self, module: str, micro_step: int, *, with_gradients: bool, pointer: int = 0) -> ModuleCall:
        """Add a module call of the forward pass and return it."""
        self.called.add(module)
        count = self._counts.get((module, micro_step), 0)
        self._counts[module, micro_step] = count + 1
        call = ModuleCall(module, micro_step, count or None, pointer)
        if not with_gradients:
            self._waiting.append(call)
        return call

    def again(self, module: str, pointer: int) -> ModuleCall | None:
        """Return the original call that checkpointing now computes again; None if the original call ran with gradients.

        The calls of a checkpointed part are recomputed in their original order. The address of the first argument
        identifies the part, because checkpointing keeps this tensor. If no address matches, the latest part is assumed,
        because a backward pass runs in reverse order.
        """
        places = [place for place, call in enumerate(self._waiting) if call is not None and call.module == module]
        if not places:
            return None
        place = places[-1]
        if self._next in places:
            place = self._next
        else:
            kept = [place for place in places if pointer and self._pointer(place) == pointer]
            place = kept[-1] if kept else place
        call, self._waiting[place] = self._waiting[place], None
        self._next = place + 1
        return call

    def forget(self, micro_step: int) -> None:
        """Delete the calls of a micro-batch, because its forward pass has raised an error."""
        self._counts = {key: count for key, count in self._counts.items() if key[1] != micro_step}
        self._waiting = [call for call in self._waiting if call is None or call.micro_step != micro_step]

    def gradient_arrived(self) -> None:
        """Store that gradients of the last recomputed part have arrived.

        The next call that checkpointing computes again belongs to another part.
        """
        self._next = None

    def _pointer(self, place: int) -> int:
        call = self._waiting[place]
        return 0 if call is None else call.pointer


SIDES: Final = {Kind.ACT_IN: "input", Kind.ACT_OUT: "output", Kind.ACT_GRAD_IN: "input", Kind.ACT_GRAD_OUT: "output"}


@dataclass(frozen=True, slots=True)
class TensorSite:
    """The tensor of one row: an input or output of a module call, or the gradient of an input or output."""

    kind: Kind
    call: ModuleCall
    index: int | None
    path: str


def activation_entry(site: TensorSite, tensor: torch.Tensor, vpp_stage: int | None) -> PlanEntry:
    """Return the plan entry of `tensor`, which is the input or output at `site`, or its gradient."""
    call = site.call
    return PlanEntry(
        kind=site.kind,
        tensor=call.module,
        index=site.index,
        vpp_stage=vpp_stage,
        micro_step=call.micro_step,
        call_seq=call.seq,
        placement=placement_of(tensor),
        dtype=dtype_name(tensor.dtype),
        shape=tuple(local_tensor(tensor).shape),
        module=call.module,
        aliases=() if site.index is None else (f"{SIDES[site.kind]}{site.path}",),
    )


T = TypeVar("T")


class TensorCache(Generic[T]):
    """A cache with a value per tensor, for tensors of the graph and for gradients.

    A value becomes invalid when its tensor is freed or changed in place. Weak references detect a freed tensor. Leaf
    tensors, such as parameters, must have no weak references, because torch.utils.swap_tensors rejects a tensor with a
    weak reference. The class `Leaves` caches the values of leaf tensors.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[torch.Tensor], int, T]] = {}

    def get(self, tensor: torch.Tensor) -> T | None:
        """Return the value that was stored for `tensor`.

        Return None if no value was stored, or if the tensor was changed in place after the value was stored.
        """
        known = self._by_id.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != _version(tensor):
            return None
        return known[2]

    def before(self, tensor: torch.Tensor) -> T | None:
        """Return the value that was stored for `tensor` before the tensor was changed in place.

        Return None if no value was stored, or if the tensor was not changed.
        """
        known = self._by_id.get(id(tensor))
        return None if known is None or known[0]() is not tensor or known[1] == _version(tensor) else known[2]

    def keep(self, tensor: torch.Tensor, value: T) -> None:
        """Store `value` for `tensor`.

        Nothing is stored for parameters, and for tensors of which torch does not count the in-place changes.
        """
        version = _version(tensor)
        if version is not None and not isinstance(tensor, nn.Parameter):
            self._by_id[id(tensor)] = weakref.ref(tensor), version, value

    def clear(self) -> None:
        """Remove all values from the cache."""
        self._by_id.clear()


class Leaves(Generic[T]):
    """A cache with a value per leaf tensor.

    Leaf tensors are inputs, masks, parameters, and all tensors that are computed without gradients. The cache keeps
    them alive, but hardly longer than the training does. It contains the arguments of running calls. Until the next
    call begins, it also contains the arguments and results of the call that ended last, unless no other call is
    running.
    """

    def __init__(self) -> None:
        self._running: list[dict[int, tuple[torch.Tensor, int, T]]] = []
        self._last: dict[int, tuple[torch.Tensor, int, T]] = {}

    def call_begins(self) -> None:
        """Start the cache of a module call that begins. Called before the arguments of the call are read."""
        self._running.append({})

    def arguments_read(self) -> None:
        """Release the tensors of the call that ended last. Called after the arguments of the next call were read."""
        self._last = {}

    def call_ended(self) -> None:
        """End the cache of the innermost running module call, after its results were read.

        The tensors of this call remain in memory until the next call, unless no other call is running.
        """
        ended = self._running.pop() if self._running else {}
        self._last = ended if self._running else {}

    def clear(self) -> None:
        """Release all tensors of the cache."""
        self._running.clear()
        self._last = {}

    def get(self, tensor: torch.Tensor) -> T | None:
        """Return the value that was stored for `tensor`.

        Return None if no value was stored, or if the tensor was changed in place after the value was stored.
        """
        for known in (*reversed(self._running), self._last):
            found = known.get(id(tensor))  # the tensor is alive, so no other one has its id()
            if found is not None:
                return found[2] if found[1] == _version(tensor) else None
        return None

    def keep(self, tensor: torch.Tensor, value: T) -> None:
        """Store `value` for `tensor` in the cache of the innermost call.

        Nothing is stored for tensors of which torch does not count the in-place changes.
        """
        version = _version(tensor)
        if version is not None and self._running:
            self._running[-1][id(tensor)] = tensor, version, value


def _version(tensor: torch.Tensor) -> int | None:
    if tensor.is_inference():
        return None
    version: int = tensor._version  # noqa: SLF001 - the count of in-place changes has no public name
    return version
