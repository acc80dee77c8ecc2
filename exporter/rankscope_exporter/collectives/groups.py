"""The ranks of each process group, by the name that torch's flight record has for it."""

from __future__ import annotations

import contextlib

import torch.distributed as dist


def ranks_by_group() -> dict[str, tuple[int, ...]]:
    """Return the global ranks of every group that this rank is in; torch has no public list of them."""
    world = getattr(dist.distributed_c10d, "_world", None)
    names = dict(getattr(world, "pg_names", None) or {})
    found: dict[str, tuple[int, ...]] = {}
    for group, name in names.items():
        with contextlib.suppress(ValueError, RuntimeError):  # destroyed meanwhile
            found[str(name)] = tuple(sorted(dist.get_process_group_ranks(group)))
    return found
