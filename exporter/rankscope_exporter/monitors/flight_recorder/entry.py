"""Entries of torch's flight record as rows of the store, and a summary of collectives that are not over.

The summary is read without the interpreter lock: a device that hangs may not answer, and other threads must go on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, Final, Self

import torch

from rankscope_contract.diagnostics.collective_format import dtype_text, message_bytes, spans
from rankscope_contract.diagnostics.stacks import MAX_DETAILS_BYTES, Collective, FlightRecord, GroupProgress
from rankscope_exporter.monitors.flight_recorder.torch_api import (
    Raw,
    Report,
    has_groups,
    ranks_by_group,
    read_without_stacks,
)

ENTERED: Final = "entered"
LEFT: Final = "left"

_LEFT_OUT: Final = (f"{Path(__file__).parents[2]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}", "<frozen ")
_DONE: Final = "completed"
_MOST_FILES: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One collective of this rank."""

    record_id: int
    created_us: int  # UTC microseconds
    op: str
    backend: str
    group: str
    group_id: str
    ranks: tuple[int, ...]  # empty where torch does not say
    seq: int  # within the group, or of the messages between two ranks
    is_p2p: bool
    is_over: bool
    bytes: int | None
    dtype: str | None
    call_site: str | None
    seconds: float | None

    @classmethod
    def of(cls, raw: Raw, ranks: Mapping[str, tuple[int, ...]]) -> Self:
        """Return `raw` in our terms; `ranks` are those of each group."""
        backend, _, op = str(raw["profiling_name"]).rpartition(":")
        number, description = (str(part) for part in raw["process_group"])
        is_p2p = bool(raw.get("is_p2p"))
        types = [*raw.get("input_dtypes", ()), *raw.get("output_dtypes", ())]
        duration = raw.get("duration_ms")
        return cls(
            record_id=int(raw["record_id"]),
            created_us=int(raw["time_created_ns"]) // 1000,
            op=op.partition(" ")[0],  # without the peers: `send 0->1`
            backend=backend,
            group=number if description in ("", "undefined") else description,
            group_id=number,
            ranks=ranks.get(number, ()),
            seq=int(raw["p2p_seq_id" if is_p2p else "collective_seq_id"]),
            is_p2p=is_p2p,
            is_over=is_over(raw),
            bytes=bytes_of(raw),
            dtype=dtype_text(types),
            call_site=call_site(raw.get("frames", ())),
            seconds=None if duration is None else float(duration) / 1000,
        )

    def later(self, raw: Raw) -> Self:
        """Return this entry as it is in a later reading."""
        duration = raw.get("duration_ms")
        seconds = None if duration is None else float(duration) / 1000
        return replace(self, is_over=is_over(raw), seconds=seconds)

    def row(self, step: int | None, call_seq: int | None, *, is_kept: bool = True) -> dict[str, Any]:
        """Return the row of the dataset `collectives`; what torch has overwritten may be over by now."""
        under_way = ENTERED if is_kept else None
        return {
            "step": step,
            "call_seq": call_seq,
            "op": self.op,
            "group": self.group,
            "group_size": len(self.ranks) or None,
            "bytes": self.bytes,
            "dtype": self.dtype,
            "call_site": self.call_site,
            "t_start": self.created_us,
            "duration": self.seconds,
            "collective_seq": self.seq,
            "group_id": self.group_id,
            "group_ranks": _spans(self.ranks) or None,
            "state": LEFT if self.is_over else under_way,
            "backend": self.backend,
            "is_p2p": self.is_p2p,
        }


def is_over(raw: Raw) -> bool:
    """Return whether this rank is through; gloo never says that an entry has begun or ended, and only retires it."""
    return bool(raw.get("retired", False)) or raw.get("state") == _DONE


def bytes_of(raw: Raw) -> int | None:
    """Return the bytes of the message; see `message_bytes`."""
    sides = ("input_sizes", "input_dtypes", "output_sizes", "output_dtypes")
    return message_bytes(*(raw.get(side, ()) for side in sides))


def call_site(frames: Iterable[Mapping[str, Any]]) -> str | None:
    """Return `model/loss.py[23]`, the innermost place outside of torch and of ours; None where there is none.

    A thread of torch's own, as computes gradients on a device, has no Python code to name.
    """
    for frame in frames:
        file = str(frame["filename"])
        if not file.startswith(_LEFT_OUT):
            return f"{short_file(file)}[{frame['line']}]"
    return None


@lru_cache(maxsize=_MOST_FILES)
def short_file(file: str) -> str:
    """Return a path without the folders that differ from machine to machine: with those of its package alone."""
    package = next((_package(module) for module in list(sys.modules.values()) if _file_of(module) == file), "")
    levels = package.count(".") + 1 if package else 0
    return "/".join(PurePath(file).parts[-levels - 1 :])


def _file_of(module: Any) -> Any:
    return vars(module).get("__file__") if hasattr(module, "__dict__") else None


def _package(module: Any) -> str:
    return str(vars(module).get("__package__") or "")


_spans: Callable[[Sequence[int]], str] = lru_cache(maxsize=256)(spans)


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
