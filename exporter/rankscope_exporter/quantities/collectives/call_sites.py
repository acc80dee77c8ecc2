"""Call sites of collectives: the innermost line of code outside of torch and Rankscope, and the stack of this line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Final

from rankscope_exporter.monitors.flight_recorder.entry import (
    NOT_SCRIPT_CODE,
    OUR_CODE,
    TORCH_CODE,
    short_file,
    short_path,
)

MAX_FRAMES: Final = 128
_MOST_STACKS: Final = 4096
"""Largest number of cached call stacks.

Recursion can produce any number of different stacks. Without the limit, they could fill the memory.
"""

_Key = tuple[tuple[CodeType, int], ...]


@dataclass(frozen=True, slots=True)
class CallSite:
    """A line of the script that calls a collective.

    `label` consists of the file, with the folders of its package, and of the line number: `loss.py[23]`.
    """

    label: str
    stack: tuple[str, ...]
    """The call stack of the collective, outermost first: for each frame, the label of its line and the function."""
    is_chosen: bool


class CallSites:
    """The call sites of a script, and the selection of call sites by regular expressions.

    A call site is chosen if one of `expressions` is found in its stack. If there are no expressions, all call sites are
    chosen. An expression is searched in a text with one line per frame of the call stack, outermost first. A line has
    the form `/whole/path/loss.py[23] function`.
    """

    def __init__(self, expressions: Sequence[str] = ()) -> None:
        self._expressions = [re.compile(expression, re.DOTALL) for expression in expressions]
        self._known: dict[_Key, CallSite] = {}

    def of(self, caller: FrameType) -> CallSite | None:
        """Return the call site of the frame `caller`; None if the code of the frame is that of torch or Rankscope."""
        if caller.f_code.co_filename.startswith((OUR_CODE, TORCH_CODE)):
            return None
        frames = _frames(caller)
        key = tuple((frame.f_code, frame.f_lineno) for frame in frames)
        site = self._known.get(key)
        if site is None:
            if len(self._known) >= _MOST_STACKS:
                self._known.clear()
            site = self._known[key] = self._site(frames)
        return site

    def of_record(self, frames: Iterable[Mapping[str, Any]], label: str) -> CallSite:
        """Return the call site with the label `label` for a collective call in torch's flight record.

        `frames` are the frames of the call stack in the flight record, innermost first.
        """
        own = [frame for frame in frames if not str(frame["filename"]).startswith(NOT_SCRIPT_CODE)][::-1]
        return CallSite(
            label=label,
            stack=tuple(f"{short_file(str(frame['filename']))}[{frame['line']}] {frame['name']}" for frame in own),
            is_chosen=self._chooses(f"{frame['filename']}[{frame['line']}] {frame['name']}" for frame in own),
        )

    def _site(self, frames: Sequence[FrameType]) -> CallSite:
        outermost_first = frames[::-1]
        return CallSite(
            label=_label(frames[0]),
            stack=tuple(f"{_label(frame)} {frame.f_code.co_qualname}" for frame in outermost_first),
            is_chosen=self._chooses(
                f"{frame.f_code.co_filename}[{frame.f_lineno}] {frame.f_code.co_qualname}" for frame in outermost_first
            ),
        )

    def _chooses(self, lines: Iterable[str]) -> bool:
        if not self._expressions:
            return True
        text = "\n".join(lines)
        return any(expression.search(text) for expression in self._expressions)


def _frames(caller: FrameType) -> list[FrameType]:
    """Return the frames of the script, from `caller` to the outermost frame."""
    frames: list[FrameType] = []
    frame: FrameType | None = caller
    while frame is not None and len(frames) < MAX_FRAMES:
        if not frame.f_code.co_filename.startswith(NOT_SCRIPT_CODE):
            frames.append(frame)
        frame = frame.f_back
    return frames


def _label(frame: FrameType) -> str:
    """Return file and line of a frame as text.

    Folders outside of the package, which differ between machines, are left out.
    """
    names = frame.f_globals
    package = names.get("__package__") or (names.get("__name__") or "").rpartition(".")[0]
    return f"{short_path(frame.f_code.co_filename, package)}[{frame.f_lineno}]"
