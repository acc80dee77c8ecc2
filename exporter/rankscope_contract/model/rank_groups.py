"""Group ranks that are at the same place in the code, and sort the groups by probable cause.

The input is stacks and flight records; the output is text. The functions have no side effects. A rank in a collective
waits for the ranks that are not in it. Therefore ranks in no collective come first, then ranks with lower sequence
numbers, then smaller groups. The first line shows the probable cause.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from rankscope_contract.model.collective_format import ranks_in, spans
from rankscope_contract.model.stacks import Collective, FlightRecord, Frame, StackDump

MOST_SPANS: Final = 16
"""Maximum number of spans of consecutive ranks, such as `0-7`, in a list of ranks that is displayed.

Without this limit, a text about every second one of 1,000 ranks would list 500 spans.
"""

_LIBRARIES: Final = ("site-packages", "dist-packages")
_NO_SEQ: Final = -1


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


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that are at the same place in the code, in ascending order."""

    standings: tuple[Standing, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(standing.rank for standing in self.standings)

    def __str__(self) -> str:
        return f"{ranks_text(self.ranks)} {self.standings[0]}"


def grouped(standings: Iterable[Standing]) -> list[Group]:
    """Return groups of the ranks that are at the same place in the code. Groups that block other ranks come first."""
    found: dict[tuple[object, ...], list[Standing]] = {}
    for standing in sorted(standings, key=lambda item: item.rank):
        found.setdefault(standing.key, []).append(standing)
    return sorted((Group(tuple(members)) for members in found.values()), key=_order)


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


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text such as `rank 3` or `ranks 0-2, 5`.

    After MOST_SPANS spans, the text ends with the number of further ranks.
    """
    found = spans(ranks).split(",")
    text = ", ".join(found[:MOST_SPANS])
    if len(found) > MOST_SPANS:
        text += f" and {len(set(ranks)) - len(ranks_in(','.join(found[:MOST_SPANS]))):,} more"
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"


def _order(group: Group) -> tuple[object, ...]:
    pending = group.standings[0].pending
    seq = _NO_SEQ if pending is None else pending.seq
    return pending is not None, seq, len(group.standings), group.ranks
