"""How much memory is free for one more tensor on a device, as far as can be asked without waiting for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

_PROC: Final = Path("/proc")
_GROUPS: Final = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process may take; 0 where nobody knows.

    On CUDA what the driver has left and what torch's allocator holds unused. On a host the least that the system or a
    control group has left, divided among the ranks of this host, who all take the same at the same time.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu":
        return 0
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return host_bytes() // (int(ranks) if ranks.isdecimal() and int(ranks) else 1)


def host_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Return what is left of the host's memory, or of the control groups that this process is in."""
    return max(0, min([_available(proc / "meminfo"), *_left_in_groups(proc / "self/cgroup", groups)]))


def _available(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0


def _left_in_groups(membership: Path, groups: Path) -> Iterator[int]:
    """Yield what each group leaves, of the process's own up to the root; nothing of one without a limit."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in (line for line in lines if len(line) == len(("id", "controllers", "path"))):
        if not controllers:
            yield from _left_along(groups, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            yield from _left_along(groups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _left_along(root: Path, path: str, limit: str, usage: str) -> Iterator[int]:
    own = Path(path.lstrip("/"))
    for group in (own, *own.parents):
        try:
            yield int((root / group / limit).read_text()) - int((root / group / usage).read_text())
        except (OSError, ValueError):  # "max", or a group that is not mounted here
            continue
