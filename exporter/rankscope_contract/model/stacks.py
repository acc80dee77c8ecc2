"""Stacks of a rank's threads and its flight record, their JSON form in the details of an event, and their text.

The exporter reads the stacks; the service compares those of all ranks.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from types import UnionType
from typing import Any, Final, Self, get_args, get_type_hints

from rankscope_contract.model.collective_format import ranks_in, spans

MAX_DETAILS_BYTES: Final = 65_536
"""Maximum size in bytes of the details of one event.

The ring can hold about 100 such events in addition to the records of the steps.
"""

_LIBRARIES: Final = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """A document in the details of an event."""

    def document(self) -> dict[str, Any]:
        """Return the content as a JSON document."""
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.document(), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Return the object in `document`, the parsed details of an event. Unknown names in it are ignored.

        Raises ValueError if `document` has no such object.
        """
        try:
            return cls(**_converted_fields(cls, document))
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a {cls.__name__}: {error!r}") from error


def _converted_fields(of: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _converted(hint, values[name]) for name, hint in _hints(of).items() if name in values}


_hints: Final[Callable[[Any], dict[str, Any]]] = functools.cache(get_type_hints)


def _converted(hint: Any, value: Any) -> Any:
    """Return the JSON value `value` as an object of the type `hint` of a field."""
    arguments = get_args(hint)
    if isinstance(hint, UnionType):  # the other type is None
        return None if value is None else _converted(arguments[0], value)
    if arguments:
        return tuple(_converted(arguments[0], item) for item in value)
    if hint is Frame:
        value = dict(zip(_hints(Frame), value, strict=True))
    return hint(**_converted_fields(hint, value)) if hasattr(hint, "__dataclass_fields__") else hint(value)


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
class StackDump(Details):
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", spans(ranks_in(self.ranks)))  # raises ValueError for another text


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecord(Details):
    """Flight record of a rank: its latest collectives, oldest first. Active collectives are always included."""

    reason: str
    collectives: tuple[Collective, ...]
    recorded: int = 0  # number of entries in torch's recorder
    groups: tuple[GroupProgress, ...] = ()

    @property
    def pending(self) -> Collective | None:
        """Return the collective that has been active for the longest time, or None if no collective is active."""
        return next((entry for entry in self.collectives if entry.is_pending), None)

    @property
    def latest(self) -> Collective | None:
        return self.collectives[-1] if self.collectives else None


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
