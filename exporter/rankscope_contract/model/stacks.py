"""Stacks of a rank's threads and its flight record, their JSON form in the details of an event, and their text.

The exporter reads the stacks; the service compares those of all ranks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Final, Self

from rankscope_contract.model.collective_format import ranks_in, spans

MAX_DETAILS_BYTES: Final = 65_536
"""Maximum size in bytes of the details of one event.

The ring can hold about 100 such events in addition to the records of the steps.
"""

_LIBRARIES: Final = ("site-packages", "dist-packages")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Place in the code of one rank.

    `frames` is the stack of its training thread, the innermost call first. `calls` is the name of the C function that
    the innermost frame is executing. `pending` is the collective in which the rank is, and `latest` the last one that
    it entered; both come from its flight record.
    """

    rank: int
    frames: tuple[Frame, ...] = ()
    calls: str | None = None
    pending: Collective | None = None
    latest: Collective | None = None

    @classmethod
    def of(cls, rank: int, stacks: StackDump | None, flight: FlightRecord | None) -> Standing:
        """Return the place of `rank`, as shown by its stacks and its flight record. Either of them may be None."""
        thread = stacks.training_thread if stacks else None
        return cls(
            rank=rank,
            frames=thread.frames if thread else (),
            calls=thread.calls if thread else None,
            pending=flight.pending if flight else None,
            latest=flight.latest if flight else None,
        )

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for ranks at the same place in the code."""
        pending = None if self.pending is None else (self.pending.op, self.pending.group, self.pending.seq)
        return pending, self.calls, tuple(frame.short for frame in self.frames)

    def __str__(self) -> str:
        own = own_frame(self.frames)
        if self.pending is not None:
            return f"in {self.pending}" + (f", called at {own}" if own else "")
        if own is None:
            return "in no Python code"
        where = self._place(own)
        return where if self.latest is None else f"{where}; its last collective was {self.latest.op} {self.latest.seq}"

    def _place(self, own: Frame) -> str:
        top = self.frames[0]
        if own is not top:
            return f"in {top.function} ({top.short[0]}:{top.line}), called at {own}"
        return f"in {self.calls.removeprefix('.')}, called at {own}" if self.calls else f"at {own}"


def own_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame outside of libraries and Python, else the innermost frame; None without frames."""
    return next((frame for frame in frames if not is_library(frame.file)), frames[0] if frames else None)


def is_library(file: str) -> bool:
    """Return whether `file` belongs to an installed package or to Python, and not to the training code."""
    return any(part in _LIBRARIES for part in PurePath(file).parts) or is_standard_library(file)


def is_standard_library(file: str) -> bool:
    """Return whether `file` is part of Python itself, such as /usr/lib/python3.11/threading.py."""
    parts = PurePath(file).parts
    if any(part in _LIBRARIES for part in parts):
        return False
    return file.startswith("<frozen") or any(
        one == "lib" and two.startswith("python3") for one, two in itertools.pairwise(parts)
    )


def stacks_text(dump: StackDump) -> str:
    """Return the stacks in `dump` as text for users, the innermost call of each thread first."""
    parts = []
    for thread in dump.threads:
        role = " (training)" if thread.is_training else " (Rankscope)" if thread.is_ours else ""
        calls = [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in thread.frames]
        parts.append("\n".join([f"Thread {thread.name or hex(thread.ident)}{role}:", *(calls or ["  no Python code"])]))
    return "\n\n".join(parts)
