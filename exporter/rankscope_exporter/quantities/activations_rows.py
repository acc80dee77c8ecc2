"""Entries of activations in the plan, created as they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from rankscope_contract.kinds import Kind
from rankscope_contract.records import PlanEntry
from rankscope_exporter.naming import local_tensor
from rankscope_exporter.objects import Slot
from rankscope_exporter.quantities.activations_calls import Call
from rankscope_exporter.quantities.base import Table

SIDES: Final = {
    Kind.ACT_IN: "input",
    Kind.ACT_OUT: "output",
    Kind.ACT_GRAD_IN: "input",
    Kind.ACT_GRAD_OUT: "output",
}


@dataclass(frozen=True, slots=True)
class Site:
    """What one row of the table is of: an input or output of a call, or the gradient of one."""

    kind: Kind
    call: Call
    index: int | None
    path: str

    @classmethod
    def of(cls, kind: Kind, call: Call, slot: Slot) -> Site:
        """Return the site of a slot."""
        return cls(kind, call, slot.index, slot.path)


class Rows:
    """The entries of the plan, made as they are needed; they stay for all later steps."""

    def __init__(self) -> None:
        self.vpp_stages: dict[str, int | None] = {}
        """By name of a module, which chunk of the model has it."""
        self._rows: dict[tuple[Kind, str, int | None, int, int | None], range | None] = {}

    def row(self, table: Table, site: Site, tensor: torch.Tensor) -> range | None:
        """Return the row of `site`, which holds `tensor`; None when the plan is full."""
        call = site.call
        key = (site.kind, call.module, site.index, call.micro_step, call.seq)
        try:
            return self._rows[key]
        except KeyError:
            row = self._rows[key] = table.add([_entry(site, tensor, self.vpp_stages.get(call.module))])
            return row


def _entry(site: Site, tensor: torch.Tensor, vpp_stage: int | None) -> PlanEntry:
    call = site.call
    return PlanEntry(
        kind=site.kind,
        tensor=call.module,
        index=site.index,
        vpp_stage=vpp_stage,
        micro_step=call.micro_step,
        call_seq=call.seq,
        placement=placement_of(tensor),
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(local_tensor(tensor).shape),
        module=call.module,
        aliases=() if site.index is None else (f"{SIDES[site.kind]}{site.path}",),
    )


def placement_of(tensor: torch.Tensor) -> str:
    """Return how an activation lies on the ranks: each has its own batch, unless it is a distributed tensor."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return "full"
    if any(placement.is_shard() for placement in placements):
        return "shard"
    return "partial" if any(placement.is_partial() for placement in placements) else "replica"
