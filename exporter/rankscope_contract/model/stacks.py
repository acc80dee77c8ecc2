"""Stacks of a rank's threads and its flight record, and their JSON form in the details of an event.

The exporter reads the stacks; `rank_groups` and `blame` interpret them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Final, Self

from rankscope_contract.model.collective_format import ranks_in, spans

MAX_DETAILS_BYTES: Final = 65_536
"""Maximum size in bytes of the details of one event.

The ring can hold about 100 such events in addition to the records of the steps.
"""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack: file, line and function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{PurePath(self.file).name}:{self.line} in {self.function}"

    @property
    def short(self) -> tuple[str, int, str]:
        """Return a key that is equal on all ranks: it is without the path of the installation folder."""
        return PurePath(self.file).name, self.line, self.function


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    """Stack of one thread, the innermost call first. Threads that Python did not start have no name."""

    ident: int
    frames: tuple[Frame, ...]
    name: str | None = None
    is_training: bool = False
    is_ours: bool = False
    calls: str | None = None
    """Name of the C function that the innermost frame is executing: `time.sleep`, or `.wait` for a method of an object.

    The name is empty if the frame executes Python code, and None if it is unknown.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StackDump:
    """Stacks of all threads of one process at one time.

    The training thread comes first; the threads of Rankscope come last.
    """

    reason: str  # hang, request, call or signal
    threads: tuple[ThreadStack, ...]
    left_out: int = 0  # threads omitted because of the size limit

    @property
    def training_thread(self) -> ThreadStack | None:
        return next((thread for thread in self.threads if thread.is_training), None)

    @property
    def training(self) -> tuple[Frame, ...]:
        """Return the frames of the training thread; empty if the stacks of the process do not contain this thread."""
        thread = self.training_thread
        return () if thread is None else thread.frames

    def document(self) -> dict[str, Any]:
        """Return the stacks as a JSON document.

        A frame is [file, line, function]. The flags of a thread, `is_training` and `is_ours`, are omitted if false.
        """
        threads = []
        for thread in self.threads:
            entry: dict[str, Any] = {"ident": thread.ident, "name": thread.name}
            entry |= {flag: True for flag in ("is_training", "is_ours") if getattr(thread, flag)}
            entry |= {} if thread.calls is None else {"calls": thread.calls}
            threads.append(entry | {"frames": [[f.file, f.line, f.function] for f in thread.frames]})
        return {"reason": self.reason, "threads": threads, "left_out": self.left_out}

    def to_json(self) -> str:
        return json.dumps(self.document(), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Return the stacks in `document`, the parsed details of an event.

        Raises ValueError if `document` does not contain stacks.
        """
        try:
            threads = tuple(
                ThreadStack(
                    ident=int(entry["ident"]),
                    name=None if entry.get("name") is None else str(entry["name"]),
                    is_training=bool(entry.get("is_training")),
                    is_ours=bool(entry.get("is_ours")),
                    calls=None if entry.get("calls") is None else str(entry["calls"]),
                    frames=tuple(Frame(str(file), int(line), str(what)) for file, line, what in entry["frames"]),
                )
                for entry in document["threads"]
            )
            return cls(reason=str(document["reason"]), threads=threads, left_out=int(document.get("left_out", 0)))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"not stacks: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective in torch's flight recorder."""

    op: str
    backend: str
    group: str
    seq: int  # within its group; equal on all ranks of the group for the same call
    is_pending: bool
    age_seconds: float  # since the rank entered it
    is_p2p: bool = False
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    group_id: str | None = None  # torch's unique name of the group; several groups may share a description
    bytes: int | None = None  # see collective_format.message_bytes

    @property
    def group_key(self) -> str:
        return self.group if self.group_id is None else self.group_id

    def __str__(self) -> str:
        shapes = ", ".join("x".join(map(str, size)) or "scalar" for size in self.sizes)
        tensors = f"{', '.join(dict.fromkeys(self.dtypes))} {shapes}".strip()
        return f"{self.op} seq {self.seq} ({', '.join(filter(None, (self.backend, self.group, tensors)))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """One process group of a rank, and the sequence number of the last collective that the rank entered in it."""

    id: str
    ranks: str  # such as 0-2,5
    latest_seq: int  # sequence number of the last collective that the rank entered


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecord:
    """Flight record of a rank: its latest collectives, oldest first. Active collectives are always included."""

    reason: str
    collectives: tuple[Collective, ...]
    recorded: int  # number of entries in torch's recorder
    groups: tuple[GroupProgress, ...] = ()

    @property
    def pending(self) -> Collective | None:
        """Return the collective that has been active for the longest time, or None if no collective is active."""
        return next((entry for entry in self.collectives if entry.is_pending), None)

    @property
    def latest(self) -> Collective | None:
        return self.collectives[-1] if self.collectives else None

    def document(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.document(), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Return the flight record in `document`, the parsed details of an event.

        Raises ValueError if `document` does not contain a flight record.
        """
        try:
            entries = tuple(
                Collective(
                    op=str(entry["op"]),
                    backend=str(entry["backend"]),
                    group=str(entry["group"]),
                    seq=int(entry["seq"]),
                    is_pending=bool(entry["is_pending"]),
                    age_seconds=float(entry["age_seconds"]),
                    is_p2p=bool(entry.get("is_p2p")),
                    sizes=tuple(tuple(int(n) for n in size) for size in entry.get("sizes", ())),
                    dtypes=tuple(map(str, entry.get("dtypes", ()))),
                    group_id=None if entry.get("group_id") is None else str(entry["group_id"]),
                    bytes=None if entry.get("bytes") is None else int(entry["bytes"]),
                )
                for entry in document["collectives"]
            )
            groups = tuple(
                GroupProgress(
                    id=str(group["id"]), ranks=spans(ranks_in(group["ranks"])), latest_seq=int(group["latest_seq"])
                )
                for group in document.get("groups", ())
            )
            recorded = int(document.get("recorded", 0))
            return cls(reason=str(document["reason"]), collectives=entries, recorded=recorded, groups=groups)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a flight record: {error!r}") from error


def stacks_text(dump: StackDump) -> str:
    """Return the stacks in `dump` as text for users, the innermost call of each thread first."""
    parts = []
    for thread in dump.threads:
        role = " (training)" if thread.is_training else " (Rankscope)" if thread.is_ours else ""
        calls = [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in thread.frames]
        parts.append("\n".join([f"Thread {thread.name or hex(thread.ident)}{role}:", *(calls or ["  no Python code"])]))
    return "\n\n".join(parts)
