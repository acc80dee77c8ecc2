"""Plan entries of activations: which call of which module, which tensor, and which tensors were read already.

Calls are numbered within a micro-batch. Checkpointing computes a part of the forward pass a second time, inside the
backward pass. Without reentrance the first time makes the graph and the second is discarded; with it the first runs
without gradients, so that only the second has tensors whose gradients arrive. These must get the names of the first.

A tensor that several modules pass on is measured once. The id() of a tensor is another tensor's once it is freed, so
the entry of a tensor ends with the tensor. Nothing here keeps a tensor alive for longer than the training does, except
for leaves until the next call of a module.
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
from rankscope_exporter.model.pytree import Slot
from rankscope_exporter.quantities.base import Table
from rankscope_exporter.statistics.tensor_access import dtype_name


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of one module. `seq` counts the calls within a micro-batch: None is the first."""

    module: str
    micro_step: int
    seq: int | None = None
    pointer: int = 0  # where the first argument lay, which checkpointing keeps


class Calls:
    """The calls of one step, in order."""

    def __init__(self) -> None:
        self.called: set[str] = set()
        self._counts: dict[tuple[str, int], int] = {}
        self._waiting: list[ModuleCall | None] = []  # without gradients so far, in their order; None once found again
        self._next: int | None = None

    def begins(self, module: str, micro_step: int, *, with_gradients: bool, pointer: int = 0) -> ModuleCall:
        """Note a call of the forward pass."""
        self.called.add(module)
        count = self._counts.get((module, micro_step), 0)
        self._counts[module, micro_step] = count + 1
        call = ModuleCall(module, micro_step, count or None, pointer)
        if not with_gradients:
            self._waiting.append(call)
        return call

    def again(self, module: str, pointer: int) -> ModuleCall | None:
        """Return the call that is recomputed; None when it had gradients the first time.

        A part is recomputed in the order in which it ran. Which part begins is told by its first argument, whose memory
        is kept for that; where that fails it is the latest one, as backward passes go.
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

    def gradient_arrived(self) -> None:
        """Note that what was recomputed last has been used: another part comes next."""
        self._next = None

    def _pointer(self, place: int) -> int:
        call = self._waiting[place]
        return 0 if call is None else call.pointer


SIDES: Final = {
    Kind.ACT_IN: "input",
    Kind.ACT_OUT: "output",
    Kind.ACT_GRAD_IN: "input",
    Kind.ACT_GRAD_OUT: "output",
}


@dataclass(frozen=True, slots=True)
class TensorSite:
    """What one row of the table is of: an input or output of a call, or the gradient of one."""

    kind: Kind
    call: ModuleCall
    index: int | None
    path: str

    @classmethod
    def of(cls, kind: Kind, call: ModuleCall, slot: Slot) -> TensorSite:
        """Return the site of a slot."""
        return cls(kind, call, slot.index, slot.path)


class ActivationEntries:
    """The entries of the plan, made as they are needed; they stay for all later steps."""

    def __init__(self) -> None:
        self.vpp_stages: dict[str, int | None] = {}
        """By name of a module, which chunk of the model has it."""
        self._rows: dict[tuple[Kind, str, int | None, int, int | None], range | None] = {}

    def row(self, table: Table, site: TensorSite, tensor: torch.Tensor) -> range | None:
        """Return the row of `site`, which holds `tensor`; None when the plan is full."""
        call = site.call
        key = (site.kind, call.module, site.index, call.micro_step, call.seq)
        try:
            return self._rows[key]
        except KeyError:
            row = self._rows[key] = table.add([_entry(site, tensor, self.vpp_stages.get(call.module))])
            return row


def _entry(site: TensorSite, tensor: torch.Tensor, vpp_stage: int | None) -> PlanEntry:
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
    """Remembers something of tensors of the graph, or of gradients on their way, until they are freed or written to.

    Weak references show when they are freed. Parameters, and leaves in general, must have none, because
    torch.utils.swap_tensors refuses a tensor with a weak reference: see Leaves.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[torch.Tensor], int, T]] = {}

    def get(self, tensor: torch.Tensor) -> T | None:
        """Return the value that was kept for this very tensor with its present content."""
        known = self._by_id.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != _version(tensor):
            return None
        return known[2]

    def before(self, tensor: torch.Tensor) -> T | None:
        """Return the value that was kept for this very tensor when it had another content."""
        known = self._by_id.get(id(tensor))
        return None if known is None or known[0]() is not tensor or known[1] == _version(tensor) else known[2]

    def keep(self, tensor: torch.Tensor, what: T) -> None:
        """Remember `what`; nothing of a tensor that counts no changes, and nothing of a parameter."""
        version = _version(tensor)
        if version is not None and not isinstance(tensor, nn.Parameter):
            self._by_id[id(tensor)] = weakref.ref(tensor), version, what

    def clear(self) -> None:
        """Forget everything."""
        self._by_id.clear()


class Leaves(Generic[T]):
    """Remembers something of leaf tensors: inputs, masks, parameters, and all that is computed without gradients.

    They are held, but only while the training holds them anyway, or nearly: what the calls under way were given, and
    what the last call to end was given and returned, until the next call begins or none is under way.
    """

    def __init__(self) -> None:
        self._under_way: list[dict[int, tuple[torch.Tensor, int, T]]] = []
        self._last: dict[int, tuple[torch.Tensor, int, T]] = {}

    def call_begins(self) -> None:
        """Note that a call begins; its arguments are read next."""
        self._under_way.append({})

    def arguments_read(self) -> None:
        """Drop the tensors of the last call."""
        self._last = {}

    def call_ended(self) -> None:
        """Note that the innermost call is over and its results have been read."""
        ended = self._under_way.pop() if self._under_way else {}
        self._last = ended if self._under_way else {}

    def clear(self) -> None:
        """Drop all tensors."""
        self._under_way.clear()
        self._last = {}

    def get(self, tensor: torch.Tensor) -> T | None:
        """Return the value that was kept for this very tensor with its present content."""
        for known in (*reversed(self._under_way), self._last):
            found = known.get(id(tensor))  # of a tensor that is held, so no other one has its id()
            if found is not None:
                return found[2] if found[1] == _version(tensor) else None
        return None

    def keep(self, tensor: torch.Tensor, what: T) -> None:
        """Remember `what` for the innermost call; nothing of a tensor that counts no changes."""
        version = _version(tensor)
        if version is not None and self._under_way:
            self._under_way[-1][id(tensor)] = tensor, version, what


def _version(tensor: torch.Tensor) -> int | None:
    if tensor.is_inference():
        return None
    version: int = tensor._version  # noqa: SLF001 - the count of in-place changes; torch has no other name for it
    return version
