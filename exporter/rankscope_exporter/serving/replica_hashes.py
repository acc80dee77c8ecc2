"""One number per group of replicas for the page: equal on all its ranks as long as all their hashes are. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

_BYTES: Final = 6
"""A sample is a float64, which holds 53 bits exactly."""


@dataclass(frozen=True, slots=True)
class ReplicaHash:
    """The hashes of all that the ranks `replicas` hold alike, in one number below 2^48, and their step."""

    replicas: str
    step: int | None
    value: int


def combined(step: int | None, rows: Iterable[Mapping[str, Any]]) -> list[ReplicaHash]:
    """Return one number for each group of replicas in `rows`, whatever their order."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        if row["replicas"] is None:
            continue
        key = (str(row["kind"]), str(row["tensor"]), str(row.get("vpp_stage")), str(row["hash"]))
        groups.setdefault(row["replicas"], []).append(key)
    return [ReplicaHash(replicas, step, _number(sorted(keys))) for replicas, keys in groups.items()]


def _number(keys: Iterable[tuple[str, ...]]) -> int:
    text = "\n".join("\t".join(key) for key in keys)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=_BYTES).digest(), "big")
