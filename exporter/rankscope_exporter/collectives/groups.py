"""The ranks of each process group, by the name that torch's flight record has for it."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from rankscope_exporter.collectives.flight import Report


def ranks_by_group(report: Report) -> dict[str, tuple[int, ...]]:
    """Return the global ranks of every group that this rank is in; torch has no public list of them.

    An error is reported and not raised: a flight record without the ranks of its groups is still of use.
    """
    found: dict[str, tuple[int, ...]] = {}
    try:
        world = getattr(dist.distributed_c10d, "_world", None)
        for group, name in list((getattr(world, "pg_names", None) or {}).items()):
            with contextlib.suppress(ValueError, RuntimeError):  # destroyed meanwhile
                found[str(name)] = tuple(sorted(dist.get_process_group_ranks(group)))
    except Exception as error:  # noqa: BLE001 - a structure of torch's own, which may change
        report("looking up the ranks of process groups", error)
    return found
