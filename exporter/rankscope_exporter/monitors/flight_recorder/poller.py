"""Thread that reads torch's flight recorder periodically and publishes each collective as a row.

The training thread stores the start and end of each step and wakes the reading thread when a reading is due. This costs
two clock reads per step and no lock. Rows are published directly, without the publisher thread, because torch queries
the device when it writes the record, and the device may not respond.

A reading holds the GIL. It delays this rank and all ranks that wait for this rank in a collective. If all ranks read at
the same step, the job is delayed only once. Readings are therefore due at steps divisible by a power of two. Ranks
whose readings take a similar time choose the same power without communication.

`StepAssignment` assigns entries of the flight record to steps, and counts entries that torch overwrote before they were
read.

An entry belongs to the last step that began before the entry was created. It becomes a row of the dataset `collectives`
when its step has ended and its collective is finished on this rank, or when torch has overwritten the entry.

For a hang, the record is read without the GIL and summarized: a device that hangs may not respond, and other threads
must not be blocked.
"""

from __future__ import annotations

import bisect
import functools
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath
from types import FrameType
from typing import Any, Final

import torch

from rankscope_contract.model.collective_format import dtype_text, message_bytes, spans
from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.stacks import MAX_DETAILS_BYTES, Collective, FlightRecord, GroupProgress
from rankscope_exporter.adapters.process_group import has_groups
from rankscope_exporter.monitors.flight_recorder.torch_api import (
    Raw,
    Report,
    prepare_stacks,
    ranks_by_group,
    read_with_stacks,
    read_without_stacks,
)
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.records.record import StepObserver, StepRecord, now_microseconds

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


def row_of(raw: Raw, ranks: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the row of the dataset `collectives` for an entry of torch's flight record, without its step.

    `ranks` contains the ranks of each process group by group id.
    """
    call = _call_fields(raw)
    group_ranks = ranks.get(call["group_id"], ())
    return {
        "step": None,
        "call_seq": None,
        "op": call["op"].partition(" ")[0],  # without the peers, as in `send 0->1`
        "group": call["group"],
        "group_size": len(group_ranks) or None,
        "bytes": call["bytes"],
        "dtype": dtype_text([*raw.get("input_dtypes", ()), *raw.get("output_dtypes", ())]),
        "call_site": call_site(raw.get("frames", ())),
        "t_start": _created_ns(raw) // 1000,
        "collective_seq": call["seq"],
        "group_id": call["group_id"],
        "group_ranks": _spans(group_ranks) or None,
        "backend": call["backend"],
        "is_p2p": call["is_p2p"],
        **progress_of(raw),
    }


def progress_of(raw: Raw) -> dict[str, Any]:
    """Return the fields of the row that change until the collective is finished."""
    duration = raw.get("duration_ms")
    return {
        "duration": None if duration is None else float(duration) / 1000,
        "state": LEFT if is_over(raw) else ENTERED,
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
    groups, most = _groups(entries, ranks or {}), KEPT
    while True:
        collectives = tuple(
            Collective(
                **_call_fields(entry),
                is_pending=not is_over(entry),
                age_seconds=round(now - _created_ns(entry) / 1e9, 3),
                sizes=tuple(tuple(size) for size in entry.get("input_sizes", ())),
                dtypes=tuple(entry.get("input_dtypes", ())),
            )
            for entry in _selected(entries, most)
        )
        record = FlightRecord(reason=reason, collectives=collectives, recorded=len(entries), groups=groups)
        if most == 1 or len(record.to_json().encode()) <= MAX_DETAILS_BYTES:
            return record
        most //= 2


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


def _selected(entries: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """Return at most `most` entries of the flight record, oldest first: unfinished ones, then the latest finished."""
    # Converting thousands of entries would hold the GIL for too long.
    entries = sorted(entries, key=_created_ns)
    pending = [entry for entry in entries if not is_over(entry)][:most]
    finished = [entry for entry in entries[-most:] if is_over(entry)]
    return sorted((*pending, *finished[max(0, len(finished) + len(pending) - most) :]), key=_created_ns)


MOST_STEPS: Final = 16_384
"""Number of recent steps with a stored start time. torch has overwritten the entries of older steps."""

_AT_THE_END: Final = 1 << 62


@dataclass(slots=True)
class _Held:
    """A row of the dataset `collectives` for an entry of the flight record that is not complete yet."""

    row: dict[str, Any]
    has_step: bool = False
    is_kept: bool = True  # torch has not overwritten it
    is_behind_gap: bool = False  # the entries just before it were overwritten


class StepAssignment:
    """Assigns the entries of repeated readings to steps.

    Each reading contains the complete record of each recorder of this process.
    """

    def __init__(self, after: Mapping[str, int] | None = None) -> None:
        """`after` maps the name of each flight recorder to the `record_id` of the last entry that was already read.

        By default, no entry was read before.
        """
        self._begins: deque[tuple[int, int | None]] = deque(maxlen=MOST_STEPS)
        self._ended_us = 0
        self.last_id: dict[str, int] = dict(after or {})
        self._held: dict[tuple[str, int], _Held] = {}
        self._counts: dict[int | None, int] = {}
        self._incomplete: set[int | None] = set()  # steps without `call_seq`: some entries were overwritten

    def step_ended(self, step: int | None, began_us: int, ended_us: int) -> None:
        """Store the start and the end of a step.

        Call this method in the order of the steps, and before entries of the step are passed to the method `take`.
        """
        self._begins.append((began_us, step))
        self._ended_us = max(self._ended_us, ended_us)

    def take(
        self, readings: Mapping[str, Sequence[Raw]], ranks: Mapping[str, tuple[int, ...]], *, is_last: bool = False
    ) -> tuple[list[dict[str, Any]], int]:
        """Return the rows of the dataset `collectives` that are complete, in the order of the collectives.

        The second result is the number of entries that torch overwrote before they were read. The entries in `readings`
        are sorted by `record_id`.
        """
        overwritten = sum(self._read(recorder, raws, ranks) for recorder, raws in readings.items())
        until = _AT_THE_END if is_last else self._ended_us
        begins, rows = list(self._begins), []
        for key, held in sorted(self._held.items(), key=lambda item: (item[1].row["t_start"], item[0][1])):
            if held.row["t_start"] < until and not held.has_step:
                self._assign(held, begins)
            if held.has_step and (held.row["state"] == LEFT or not held.is_kept or is_last):
                del self._held[key]
                if not held.is_kept and held.row["state"] == ENTERED:  # torch has overwritten the entry
                    held.row["state"] = None
                rows.append(held.row)
        # Counts of the last step are kept, because it may have calls after its end.
        last = self._begins[-1][1] if self._begins else None
        self._counts = {step: count for step, count in self._counts.items() if step == last}
        self._incomplete &= {last}
        return rows, overwritten

    def _read(self, recorder: str, raws: Sequence[Raw], ranks: Mapping[str, tuple[int, ...]]) -> int:
        """Store the new entries in `raws`, and update the stored entries that are not rows yet.

        Return the number of entries that torch overwrote before they were read.
        """
        last = self.last_id.get(recorder, -1)
        if raws and int(raws[-1]["record_id"]) < last:
            self._renumber(recorder)
            last = -1
        for key, held in self._held.items():
            held.is_kept = held.is_kept and key[0] != recorder
        missed = 0
        for raw in raws:
            number = int(raw["record_id"])
            if number > last:
                self._held[recorder, number] = _Held(row_of(raw, ranks), is_behind_gap=number > last + 1)
                missed += number - last - 1
                last = number
            elif (known := self._held.get((recorder, number))) is not None:
                known.row, known.is_kept = known.row | progress_of(raw), True
        self.last_id[recorder] = last
        return missed

    def _renumber(self, recorder: str) -> None:
        """Give stored entries of `recorder` negative numbers: it has restarted and counts entries from 0 again."""
        for key in [key for key in self._held if key[0] == recorder and key[1] >= 0]:
            self._held[recorder, key[1] - _AT_THE_END] = self._held.pop(key)

    def _assign(self, held: _Held, begins: Sequence[tuple[int, int | None]]) -> None:
        position = bisect.bisect_right(begins, held.row["t_start"], key=lambda begin: begin[0]) - 1
        step = held.row["step"] = None if position < 0 else begins[position][1]
        held.has_step = True
        if held.is_behind_gap:
            self._incomplete.add(step)
        if step not in self._incomplete:
            held.row["call_seq"] = self._counts.get(step, 0)
            self._counts[step] = self._counts.get(step, 0) + 1


MOST_STEPS_BETWEEN: Final = 8192
"""Largest number of steps between two readings, a power of two.

Because of this limit, the readings of all ranks can be due at the same steps: those divisible by this number.
"""


class PollSchedule:
    """Schedules readings of the flight record so that they take at most the share `share` of the elapsed time.

    The schedule uses the duration of the last reading. All times are monotonic seconds.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._interval = 1  # steps, a power of two
        self._not_before = -math.inf

    def is_due(self, step: int | None, now: float) -> bool:
        """Return whether the flight record must be read at the end of `step`, which is at the time `now`."""
        return self._share > 0 and (step or 0) % self._interval == 0 and now >= self._not_before

    def took(self, seconds: float, step_seconds: float, now: float) -> None:
        """Compute the time of the next reading of the flight record.

        The last reading took `seconds` and ended at `now`. `step_seconds` is the duration of a training step.
        """
        pause = seconds / self._share
        self._not_before = now + pause
        steps = max(1.0, pause / step_seconds) if step_seconds > 0 else 1.0
        self._interval = min(MOST_STEPS_BETWEEN, 1 << math.ceil(math.log2(steps)))


MOST_WITH_STACKS: Final = 4096
"""Maximum number of entries for a reading with stacks.

Longer records are read without stacks, because torch holds the GIL while it writes stacks.
"""

RETIRE_SECONDS: Final = 0.2
"""Seconds that the last reading waits for unfinished entries.

A thread of torch marks an entry as finished with a delay.
"""

_read_before: Final[dict[str, int]] = {}
"""The `record_id` of the last entry that an earlier monitor of this process read, by name of the flight recorder.

This entry and older entries are not published again.
"""


def read_before() -> dict[str, int]:
    """Return the `record_id` of the last entry that an earlier monitor of this process read, by recorder name."""
    return dict(_read_before)


class FlightRecorderPoller(StepObserver):
    """Reads the flight record on a separate thread.

    Readings take at most about the share `share` of the time of one CPU core.

    With `share` 0 the record is never read.
    """

    def __init__(self, share: float, publish: Callable[[StepRecord], object], boundary: ErrorBoundary) -> None:
        self._share = share
        self._schedule = PollSchedule(share)
        self._publish = publish
        self._boundary = boundary
        self._assignment = StepAssignment(_read_before)
        self._began_us = 0
        # Steps that the assignment does not have yet: number, begin, end in microseconds.
        self._ended: deque[tuple[int | None, int, int]] = deque(maxlen=MOST_STEPS)
        self._ranks: dict[str, tuple[int, ...]] = {}  # also of destroyed groups, whose calls may be unread
        self._last_reading: float | None = None
        self._entries = 0
        self._wake = threading.Event()
        self._is_last = False
        self.thread = OwnThread(target=self._run, name="rankscope-collectives", on_fault=boundary.report)
        self._totals: dict[str, tuple[int, int]] = {}
        self.overwritten = 0
        """Number of entries of the flight record that torch has overwritten before they were read."""

    def totals(self) -> Mapping[str, tuple[int, int]]:
        """Return the number of calls and of bytes of each collective operation since the monitor was created."""
        return dict(self._totals)

    def on_before_step(self, step: int) -> None:  # noqa: ARG002 - the number may still change
        self._began_us = now_microseconds()

    def on_step_end(self, record: StepRecord) -> None:
        if self._share <= 0:
            return
        if self.thread.ident is None:
            if not has_groups():  # there are no collectives
                return
            self.thread.start()
        self._ended.append((record.step, self._began_us, now_microseconds()))
        if self._schedule.is_due(record.step, time.monotonic()):
            self._wake.set()

    def stop(self, seconds: float) -> None:
        """Request the last reading of the flight record, and wait for at most `seconds` until it has ended."""
        if self.thread.ident is not None:
            self._is_last = True
            self._wake.set()
            self.thread.join(seconds)
            _read_before.update(self._assignment.last_id)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            is_last = self._is_last
            self._boundary.call("reading the flight record", functools.partial(self._read, is_last=is_last))
            if is_last:
                return

    def _read(self, *, is_last: bool) -> None:
        has_stacks = self._entries <= MOST_WITH_STACKS and prepare_stacks()
        began, began_cpu = time.monotonic(), time.thread_time()
        steps = 0
        while self._ended:
            self._assignment.step_ended(*self._ended.popleft())
            steps += 1
        read = functools.partial(read_with_stacks if has_stacks else read_without_stacks, self._boundary.report)
        readings = read()
        if is_last and any(not is_over(entry) for entries in readings.values() for entry in entries):
            time.sleep(RETIRE_SECONDS)
            readings = read()
        self._entries = sum(map(len, readings.values()))
        self._ranks |= ranks_by_group(self._boundary.report)
        self._publish_rows(*self._assignment.take(readings, self._ranks, is_last=is_last))
        since = 0.0 if self._last_reading is None else began - self._last_reading
        self._last_reading = began
        # CPU time, because the thread holds the GIL during most of it; the time it waits for the GIL does not count.
        self._schedule.took(time.thread_time() - began_cpu, since / max(1, steps), time.monotonic())

    def _publish_rows(self, rows: Sequence[Mapping[str, Any]], overwritten: int) -> None:
        for row in rows:
            calls, total = self._totals.get(row["op"], (0, 0))
            self._totals[row["op"]] = calls + 1, total + (row["bytes"] or 0)
        self.overwritten += overwritten
        events = [_overwritten(overwritten)] if overwritten else []
        if rows or events:
            self._publish(StepRecord.now(collectives=tuple(rows), events=events))


def _overwritten(count: int) -> Event:
    return Event(
        type=EventType.NOTE,
        severity=Severity.INFO,
        op="collectives_overrun",
        value=float(count),
        message=f"{count:,} collectives have no row in the dataset collectives: "
        "torch overwrote them before they were read; increase TORCH_FR_BUFFER_SIZE or collectives_share",
    )
