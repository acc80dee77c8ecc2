"""Converts entries of torch's flight record to rows of the dataset `collectives`, and summarizes the record for a hang.

The summary is read without the GIL: a device that hangs may not respond, and other threads must not be blocked.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePath
from types import FrameType
from typing import Any, Final, Self

import torch

from rankscope_contract.model.collective_format import dtype_text, message_bytes, spans
from rankscope_contract.model.stacks import MAX_DETAILS_BYTES, Collective, FlightRecord, GroupProgress
from rankscope_exporter.adapters.process_group import has_groups
from rankscope_exporter.monitors.flight_recorder.torch_api import Raw, Report, ranks_by_group, read_without_stacks

ENTERED: Final = "entered"
LEFT: Final = "left"

OUR_CODE: Final = f"{Path(__file__).parents[2]}{os.sep}"
TORCH_CODE: Final = f"{Path(torch.__file__).parent}{os.sep}"  # with a separator: torchvision is not code of torch
NOT_SCRIPT_CODE: Final = (OUR_CODE, TORCH_CODE, "<frozen ")
"""Prefixes of the file names of stack frames that do not belong to the training script."""

_DONE: Final = "completed"
_MOST_FILES: Final = 1024


def script_frames(frame: FrameType | None, most: int) -> list[FrameType]:
    """Return at most `most` frames of the script, from `frame` to the outermost frame."""
    frames: list[FrameType] = []
    while frame is not None and len(frames) < most:
        if not frame.f_code.co_filename.startswith(NOT_SCRIPT_CODE):
            frames.append(frame)
        frame = frame.f_back
    return frames


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One collective operation of this rank, with the fields of a row of the dataset `collectives`."""

    record_id: int
    created_us: int  # UTC microseconds
    op: str
    backend: str
    group: str
    group_id: str
    ranks: tuple[int, ...]  # empty if torch does not know them
    seq: int  # within the group; for point-to-point messages, within the pair of ranks
    is_p2p: bool
    is_over: bool
    bytes: int | None
    dtype: str | None
    call_site: str | None
    seconds: float | None

    @classmethod
    def of(cls, raw: Raw, ranks: Mapping[str, tuple[int, ...]]) -> Self:
        """Create an entry from `raw`, which torch's flight recorder returned.

        `ranks` contains the ranks of each process group by group id.
        """
        fields = _call_fields(raw)
        return cls(
            **fields | {"op": fields["op"].partition(" ")[0]},  # without the peers, as in `send 0->1`
            record_id=int(raw["record_id"]),
            created_us=_created_ns(raw) // 1000,
            ranks=ranks.get(fields["group_id"], ()),
            is_over=is_over(raw),
            dtype=dtype_text([*raw.get("input_dtypes", ()), *raw.get("output_dtypes", ())]),
            call_site=call_site(raw.get("frames", ())),
            seconds=_seconds(raw),
        )

    def updated(self, raw: Raw) -> Self:
        """Return a copy with the state and duration in `raw`, the same entry in a later reading."""
        return replace(self, is_over=is_over(raw), seconds=_seconds(raw))

    def row(self, step: int | None, call_seq: int | None, *, is_kept: bool = True) -> dict[str, Any]:
        """Return the row of the dataset `collectives` for this entry.

        With `is_kept=False`, torch has overwritten the entry, so the state of an unfinished collective is unknown.
        """
        unfinished = ENTERED if is_kept else None
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
            "state": LEFT if self.is_over else unfinished,
            "backend": self.backend,
            "is_p2p": self.is_p2p,
        }


def is_over(raw: Raw) -> bool:
    """Return whether the collective is finished here. Entries of Gloo have no states, only the flag `retired`."""
    return bool(raw.get("retired", False)) or raw.get("state") == _DONE


def _call_fields(raw: Raw) -> dict[str, Any]:
    """Return the fields of a flight record entry that describe its collective.

    They are the same in a row of `collectives` and in the summary for a hang.
    """
    backend, _, op = str(raw["profiling_name"]).rpartition(":")
    group_id, description = (str(part) for part in raw["process_group"])
    is_p2p = bool(raw.get("is_p2p"))
    sides = ("input_sizes", "input_dtypes", "output_sizes", "output_dtypes")
    return {
        "op": op,
        "backend": backend,
        "group": group_id if description in ("", "undefined") else description,
        "group_id": group_id,
        "seq": int(raw["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        "is_p2p": is_p2p,
        "bytes": message_bytes(*(raw.get(side, ()) for side in sides)),
    }


def _seconds(raw: Raw) -> float | None:
    duration = raw.get("duration_ms")
    return None if duration is None else float(duration) / 1000


def _created_ns(raw: Raw) -> int:
    return int(raw["time_created_ns"])


def call_site(frames: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the innermost frame of the script, as `model/loss.py[23]`; None without one, as on threads of torch."""
    for frame in frames:
        file = str(frame["filename"])
        if not file.startswith(NOT_SCRIPT_CODE):
            return f"{short_file(file)}[{frame['line']}]"
    return None


@lru_cache(maxsize=_MOST_FILES)
def short_file(file: str) -> str:
    """Return the path `file` without the folders above its package: equal on all machines."""
    modules = (vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__"))
    package = next((str(names.get("__package__") or "") for names in modules if names.get("__file__") == file), "")
    return short_path(file, package)


def short_path(file: str, package: str) -> str:
    """Return the file name of `file` after a folder for each element of the dotted name `package`."""
    levels = package.count(".") + 1 if package else 0
    return "/".join(PurePath(file).parts[-levels - 1 :])


_spans: Callable[[Sequence[int]], str] = lru_cache(maxsize=256)(spans)


KEPT: Final = 32
"""Maximum number of entries in the event of a hang: the oldest unfinished ones, then the latest finished ones."""

MOST_GROUPS: Final = 64
"""Maximum number of process groups in the event of a hang. The most recently used ones are kept."""


def take_flight_record(reason: str, report: Report) -> FlightRecord | None:
    """Return the latest collectives of this process, if any. Recorders that cannot be read are reported and skipped."""
    if not has_groups():
        return None
    entries = [entry for recorded in read_without_stacks(report, is_urgent=True).values() for entry in recorded]
    return read_flight_record(entries, reason, time.time(), ranks_by_group(report)) if entries else None


def read_flight_record(
    entries: Sequence[Mapping[str, Any]], reason: str, now: float, ranks: Mapping[str, tuple[int, ...]] | None = None
) -> FlightRecord:
    """Return a summary of `entries`, which torch's flight recorder returned, of at most MAX_DETAILS_BYTES.

    `now` is the current time in seconds since the epoch. `ranks` contains the ranks of each process group by group id.
    """
    collectives = tuple(
        Collective(
            **_call_fields(entry),
            is_pending=not is_over(entry),
            age_seconds=round(now - _created_ns(entry) / 1e9, 3),
            sizes=tuple(tuple(size) for size in entry.get("input_sizes", ())),
            dtypes=tuple(entry.get("input_dtypes", ())),
        )
        for entry in _selected(entries)
    )
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
    """Return the sequence number of this rank's latest collective in each process group of a flight record.

    `entries` are all entries of the flight record. `ranks` contains the ranks of each process group by group id.
    """
    latest: dict[str, int] = {}
    for entry in sorted(entries, key=_created_ns):
        if not entry.get("is_p2p"):
            name = str(entry["process_group"][0])
            # The most recently used group is last.
            latest[name] = max(latest.pop(name, -1), int(entry["collective_seq_id"]))
    return tuple(
        GroupProgress(id=name, ranks=spans(ranks.get(name, ())), latest_seq=seq)
        for name, seq in list(latest.items())[-MOST_GROUPS:]
    )


def _selected(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return at most KEPT entries of the flight record for the summary of a hang, oldest first."""
    # Converting thousands of entries would hold the GIL for too long.
    entries = sorted(entries, key=_created_ns)
    pending = [entry for entry in entries if not is_over(entry)][:KEPT]
    others = [entry for entry in entries[-KEPT:] if is_over(entry)]
    return sorted((*pending, *others[max(0, len(others) + len(pending) - KEPT) :]), key=_created_ns)
