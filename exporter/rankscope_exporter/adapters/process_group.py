"""The default process group of torch.distributed: the place of this rank, and the key-value store of the group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from rankscope_exporter.adapters.torch_private import default_store
from rankscope_exporter.process.identity import RankGroup, rank_from_environment

has_groups: Callable[[], bool] = dist.is_initialized if dist.is_available() else bool
"""Return whether this process has a process group; without one there are no collectives."""


def default_group() -> RankGroup | None:
    """Return the place of this rank in the default process group; None if there is no process group."""
    return RankGroup(dist.get_rank(), dist.get_world_size(), default_store) if has_groups() else None


def rank_here(environment: Mapping[str, str]) -> int:
    """Return the rank of this process in the default process group, or else in the launcher's environment variables."""
    return dist.get_rank() if has_groups() else rank_from_environment(environment)[0]


def place_in(group: Any) -> tuple[int, tuple[int, ...]] | None:
    """Return the position of this rank in a process group and the group's global ranks; None outside of the group."""
    if group is None or not has_groups():
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    return (ranks.index(dist.get_rank()), ranks) if dist.get_rank() in ranks else None
