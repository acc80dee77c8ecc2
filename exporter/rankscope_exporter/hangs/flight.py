"""What torch's flight recorder holds of this process: which collectives were entered, and which are not over.

The recorder is torch's own and always on there (`TORCH_FR_BUFFER_SIZE`, 2000 entries); reading it takes a copy and
changes nothing. Its functions have no public name, so each is looked for, and anything unexpected means: no record.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from rankscope_contract.stacks import MAX_DETAILS_BYTES, Collective, FlightRecord

KEPT: Final = 32
"""Entries in an event: those under way (the oldest of them, should there be more), then the latest others."""

_DUMPERS: Final = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # NCCL keeps a recorder of its own
_DONE: Final = "completed"


def take_flight_record(reason: str) -> FlightRecord | None:
    """Return the latest collectives of this process; None where torch keeps no record, or nothing was recorded."""
    entries = [entry for text in _dumps() for entry in json.loads(text).get("entries", ())]
    return read_flight_record(entries, reason, time.time()) if entries else None


def read_flight_record(entries: Sequence[Mapping[str, Any]], reason: str, now: float) -> FlightRecord:
    """Return torch's `entries` in our terms; `now` is in seconds since the epoch."""
    collectives = [_collective(entry, now) for entry in _chosen(entries)]
    record = FlightRecord(reason=reason, collectives=tuple(collectives), recorded=len(entries))
    while len(record.to_json().encode()) > MAX_DETAILS_BYTES and len(record.collectives) > 1:
        half = record.collectives[len(record.collectives) // 2 :]
        pending = record.pending
        kept = half if pending is None or pending in half else (pending, *half[1:])
        record = FlightRecord(reason=reason, collectives=kept, recorded=len(entries))
    return record


def _dumps() -> Iterable[bytes]:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return  # without a process group there is nothing to tell
    c10d = getattr(torch._C, "_distributed_c10d", None)  # noqa: SLF001 - torch has no public name for it
    for name in _DUMPERS:
        if (dump := getattr(c10d, name, None)) is not None:
            yield dump(includeCollectives=True, onlyActive=False)


def _chosen(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return what is kept, oldest first. There may be thousands of entries, and training waits for the interpreter."""
    entries = sorted(entries, key=_created)
    pending = [entry for entry in entries if _is_pending(entry)][:KEPT]
    others = [entry for entry in entries[-KEPT:] if not _is_pending(entry)]
    return sorted((*pending, *others[max(0, len(others) + len(pending) - KEPT) :]), key=_created)


def _created(entry: Mapping[str, Any]) -> int:
    return int(entry["time_created_ns"])


def _is_pending(entry: Mapping[str, Any]) -> bool:
    # Gloo never says that an entry has begun or ended; whether it is over is what `retired` says everywhere.
    return not entry.get("retired", False) and entry.get("state") != _DONE


def _collective(entry: Mapping[str, Any], now: float) -> Collective:
    backend, _, op = str(entry["profiling_name"]).rpartition(":")
    number, description = entry["process_group"]
    is_p2p = bool(entry.get("is_p2p"))
    return Collective(
        op=op,
        backend=backend,
        group=str(number) if description in ("", "undefined") else str(description),
        seq=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        is_pending=_is_pending(entry),
        age_seconds=round(now - _created(entry) / 1e9, 3),
        is_p2p=is_p2p,
        sizes=tuple(tuple(size) for size in entry.get("input_sizes", ())),
        dtypes=tuple(entry.get("input_dtypes", ())),
    )
