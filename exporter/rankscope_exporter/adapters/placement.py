"""Placement of a tensor on the ranks: whole, replica, shard or partial sum. It is determined without communication."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist


def loaded(module: str, name: str) -> Any:
    """Return the class `name` of `module` for isinstance(); a value that matches no object before the import."""
    return getattr(sys.modules.get(module), name, ())


_SHORTEST_RANGE: Final = 3  # two ranks are written as a list


@dataclass(frozen=True, slots=True)
class Layout:
    """Distribution of a tensor over the ranks.

    It consists of the values for the columns `placement` and `shard_group` in the rows of statistics of the tensor.
    """

    placement: str
    shard_group: str | None = None
    """The ranks that together have one whole tensor, such as "0-7"; None if the tensor is not divided.

    The ranks with another copy of the tensor form another group.
    """


FULL: Final = Layout("full")
REPLICA: Final = Layout("replica")


def layout_of(tensor: torch.Tensor, otherwise: Layout) -> Layout:
    """Return the layout of a DTensor on its device mesh; return `otherwise` for a tensor that is no DTensor."""
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


def replicas_of(tensor: torch.Tensor) -> Sequence[int]:
    """Return the ranks, including this rank, that have the same elements of a DTensor.

    Empty for a tensor that is no DTensor.
    """
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return ()
    placements: Any = tensor.placements  # type: ignore[attr-defined]  # a DTensor: it has a mesh
    alike = [dim for dim, placement in enumerate(placements) if placement.is_replicate() and mesh.size(dim) > 1]
    if not alike or any(placement.is_partial() for placement in placements):
        return ()
    return sorted(_ranks_along(mesh, alike))


def sharded_over(group: dist.ProcessGroup | None, otherwise: Layout) -> Layout:
    """Return the layout of a tensor that is sharded over `group`; return `otherwise` if the group has one rank."""
    ranks = dist.get_process_group_ranks(group)
    return Layout("shard", ranks_text(ranks)) if len(ranks) > 1 else otherwise


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as short text: "0-7" for consecutive ranks, "0-24:8" for every eighth rank, otherwise "0,3,5"."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if list(ranks) != list(range(ranks[0], ranks[-1] + 1, max(1, step))) or len(ranks) < _SHORTEST_RANGE:
        return ",".join(map(str, ranks))
    return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")


def _is_part(placement: Any) -> bool:
    # torch's `is_shard` is False for strided shards, which combine two kinds of sharding.
    return not placement.is_replicate() and not placement.is_partial()


def _ranks_along(mesh: Any, dims: Sequence[int]) -> list[int]:
    """Return the ranks whose coordinates in the mesh differ from those of this rank only in the dimensions `dims`."""
    own = mesh.get_coordinate()
    place = tuple(slice(None) if dim in dims else own[dim] for dim in range(mesh.ndim))
    ranks: list[int] = mesh.mesh[place].reshape(-1).tolist()
    return ranks
