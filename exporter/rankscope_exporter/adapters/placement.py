"""Placement of a tensor on the ranks (whole, replica, shard), without communication; mixin of both FSDP adapters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist


def loaded(module: str, name: str) -> Any:
    """Return the class `name` of `module` for isinstance(), matching nothing while the program has not imported it."""
    return getattr(sys.modules.get(module), name, ())


_WORTH_SHORTENING: Final = 3  # two ranks are a list


@dataclass(frozen=True, slots=True)
class Layout:
    """Values of the columns `placement` and `shard_group` of a row."""

    placement: str
    shard_group: str | None = None
    """The ranks that together hold one whole tensor; those of another copy form another group."""


def layout_of(tensor: torch.Tensor, otherwise: Layout) -> Layout:
    """Return the layout of a DTensor on its mesh, and `otherwise` for any other tensor."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return otherwise
    placements: Any = tensor.placements  # type: ignore[attr-defined]  # a DTensor: it has a mesh
    parts = [dim for dim, placement in enumerate(placements) if _is_part(placement) and mesh.size(dim) > 1]
    if parts:
        return Layout("shard", ranks_text(_ranks_along(mesh, parts)))
    if any(placement.is_partial() for placement in placements) and mesh.size() > 1:
        return Layout("partial")
    return Layout("replica" if mesh.size() > 1 else otherwise.placement)


def is_replicated_over(tensor: torch.Tensor, ranks: Sequence[int]) -> bool:
    """Return whether a DTensor has the same elements on all `ranks`; False of any other tensor."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return False
    places = [(mesh.mesh == rank).nonzero().tolist() for rank in ranks]
    if not all(places):
        return False
    placements: Any = tensor.placements  # type: ignore[attr-defined]  # a DTensor: it has a mesh
    varying = [dim for dim in range(mesh.ndim) if len({place[0][dim] for place in places}) > 1]
    return all(placements[dim].is_replicate() for dim in varying)


def replicas_of(tensor: torch.Tensor) -> Sequence[int]:
    """Return the ranks, this one among them, that hold the same elements of a DTensor; none of any other tensor."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return ()
    placements: Any = tensor.placements  # type: ignore[attr-defined]  # a DTensor: it has a mesh
    alike = [dim for dim, placement in enumerate(placements) if placement.is_replicate() and mesh.size(dim) > 1]
    if not alike or any(placement.is_partial() for placement in placements):
        return ()
    return sorted(_ranks_along(mesh, alike))


def sharded_over(group: dist.ProcessGroup | None, otherwise: Layout) -> Layout:
    """Return the layout of a tensor that is sharded over `group`; `otherwise` for a group of one rank."""
    ranks = dist.get_process_group_ranks(group)
    return Layout("shard", ranks_text(ranks)) if len(ranks) > 1 else otherwise


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in short: "0-7", with a step "0-24:8", and "0,3,5" where they follow no rule."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if list(ranks) != list(range(ranks[0], ranks[-1] + 1, max(1, step))) or len(ranks) < _WORTH_SHORTENING:
        return ",".join(map(str, ranks))
    return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")


def _is_part(placement: Any) -> bool:
    """Return whether the placement shards. `is_shard` is false for strided shards (two kinds of sharding together)."""
    return not placement.is_replicate() and not placement.is_partial()


def _ranks_along(mesh: Any, dims: Sequence[int]) -> list[int]:
    """Return the ranks that differ from this one only along the mesh's `dims`."""
    here = mesh.get_coordinate()
    place = tuple(slice(None) if dim in dims else here[dim] for dim in range(mesh.ndim))
    ranks: list[int] = mesh.mesh[place].reshape(-1).tolist()
    return ranks


class Gathered:
    """Traits of both FSDP adapters: a mixin that comes before `Framework` among the bases."""

    @property
    def replicated(self) -> bool:
        """Return True: a parameter that is ignored, or too small to be sharded, is equal on all ranks."""
        return True

    @property
    def local_until_backward_ends(self) -> bool:
        """Return False: the gathered gradient is gone when backward ends."""
        return False

    @property
    def reduces_each_micro_batch(self) -> bool | None:
        """Return None: each micro-batch is reduced unless the training loop delays the reduction."""
        return None

    @property
    def reduces(self) -> bool:
        """Return True."""
        return True


def placement_of(tensor: torch.Tensor) -> str:
    """Return the placement of an activation: `full`, as each rank has its own batch, except for a DTensor."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return "full"
    if any(placement.is_shard() for placement in placements):
        return "shard"
    return "partial" if any(placement.is_partial() for placement in placements) else "replica"
