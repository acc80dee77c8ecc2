"""What torch's flight recorders hold of this process: which collectives were entered, and which are not over.

They are read without the interpreter lock: a device that hangs may not answer, and other threads must go on meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rankscope_contract.collectives import spans
from rankscope_contract.stacks import MAX_DETAILS_BYTES, Collective, FlightRecord, GroupProgress
from rankscope_exporter.collectives.entries import bytes_of, is_over
from rankscope_exporter.collectives.flight import Report, has_groups, read_without_stacks
from rankscope_exporter.collectives.groups import ranks_by_group

KEPT: Final = 32
"""Entries in an event: those under way (the oldest of them, should there be more), then the latest others."""

MOST_GROUPS: Final = 64
"""Groups in an event, those used last: a job of many pipelines has hundreds."""


def take_flight_record(reason: str, report: Report) -> FlightRecord | None:
    """Return the latest collectives of this process; None where torch keeps no record, or nothing was recorded.

    A recorder that cannot be read is reported and left out.
    """
    if not has_groups():
        return None
    entries = [entry for recorded in read_without_stacks(report, is_urgent=True).values() for entry in recorded]
    return read_flight_record(entries, reason, time.time(), ranks_by_group(report)) if entries else None


def read_flight_record(
    entries: Sequence[Mapping[str, Any]], reason: str, now: float, ranks: Mapping[str, tuple[int, ...]] | None = None
) -> FlightRecord:
    """Return torch's `entries` in our terms; `now` is in seconds since the epoch, `ranks` those of each group."""
    collectives = tuple(_collective(entry, now) for entry in _chosen(entries))
    record = FlightRecord(
        reason=reason, collectives=collectives, recorded=len(entries), groups=_groups(entries, ranks or {})
    )
    while len(record.to_json().encode()) > MAX_DETAILS_BYTES and len(record.collectives) > 1:
        half = record.collectives[len(record.collectives) // 2 :]
        pending = record.pending
        kept = half if pending is None or pending in half else (pending, *half[1:])
        record = FlightRecord(reason=reason, collectives=kept, recorded=len(entries), groups=record.groups)
    return record


def _groups(entries: Sequence[Mapping[str, Any]], ranks: Mapping[str, tuple[int, ...]]) -> tuple[GroupProgress, ...]:
    """Return how far this rank is in each group, by all that torch has."""
    latest: dict[str, int] = {}
    for entry in sorted(entries, key=_created):
        if not entry.get("is_p2p"):
            name = str(entry["process_group"][0])
            latest[name] = max(latest.pop(name, -1), int(entry["collective_seq_id"]))  # the group used last comes last
    return tuple(
        GroupProgress(id=name, ranks=spans(ranks.get(name, ())), latest_seq=seq)
        for name, seq in list(latest.items())[-MOST_GROUPS:]
    )


def _chosen(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return what is kept, oldest first. There may be thousands of entries, and training waits for the interpreter."""
    entries = sorted(entries, key=_created)
    pending = [entry for entry in entries if not is_over(entry)][:KEPT]
    others = [entry for entry in entries[-KEPT:] if is_over(entry)]
    return sorted((*pending, *others[max(0, len(others) + len(pending) - KEPT) :]), key=_created)


def _created(entry: Mapping[str, Any]) -> int:
    return int(entry["time_created_ns"])


def _collective(entry: Mapping[str, Any], now: float) -> Collective:
    backend, _, op = str(entry["profiling_name"]).rpartition(":")
    number, description = entry["process_group"]
    is_p2p = bool(entry.get("is_p2p"))
    return Collective(
        op=op,
        backend=backend,
        group=str(number) if description in ("", "undefined") else str(description),
        seq=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        is_pending=not is_over(entry),
        age_seconds=round(now - _created(entry) / 1e9, 3),
        is_p2p=is_p2p,
        sizes=tuple(tuple(size) for size in entry.get("input_sizes", ())),
        dtypes=tuple(entry.get("input_dtypes", ())),
        group_id=str(number),
        bytes=bytes_of(entry),
    )
