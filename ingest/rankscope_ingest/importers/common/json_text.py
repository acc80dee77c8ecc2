"""JSON read piece by piece out of a window that slides over the text: a document of any size fits in memory.

The streaming libraries refuse `NaN` and `Infinity`, which Python prints, and give up on a document cut short (ijson
says so in its issues 33 and 139); the decoder of the standard library takes them, one value at a time. This module
finds the values for it. No files here: the caller hands in chunks of bytes.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Iterator
from typing import Any, Final

MAX_VALUE_CHARACTERS: Final = 1 << 24
"""A single value beyond this is given up: a window that grows without end is no window."""

_MAX_DIGITS: Final = 400  # beyond float64 anyway
_EDGE_CHARACTERS: Final = 16  # a token that begins so near the end of the window may go on behind it
_BLANK: Final = re.compile(r"[ \t\r\n]*")
_STRUCTURE: Final = " \t\r\n,]}:"


def _whole(digits: str) -> int | float:
    # int() refuses thousands of digits, to protect itself.
    return int(digits) if len(digits) <= _MAX_DIGITS else math.copysign(math.inf, -1 if digits[0] == "-" else 1)


DECODER: Final = json.JSONDecoder(parse_int=_whole)
"""Takes what Python's own decoder takes, and numbers of any length."""


class Cut(Exception):  # noqa: N818 - a state of the text, not an error of the caller
    """The text ends inside a value."""


class Malformed(Exception):  # noqa: N818 - as above
    """What stands here is no JSON, or too long to be a value of a log."""


class JsonWindow:
    """A position in a JSON text of any length. Values behind the position are forgotten."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._decode = codecs.getincrementaldecoder("utf-8-sig")(errors="replace").decode
        self._text = ""
        self._at = 0
        self._line = 1
        self._counted = 0  # up to where the window's line ends are counted
        self._ended = False

    def peek(self) -> str:
        """Return the next character that is not blank, and stay before it. Raises Cut at the end of the text."""
        if self._at < len(self._text) and (character := self._text[self._at]) > " ":
            return character
        while True:
            blank = _BLANK.match(self._text, self._at)
            self._at = blank.end() if blank else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._refill():
                raise Cut

    def take(self, character: str) -> None:
        """Go behind `character`, which must come next."""
        if self.peek() != character:
            raise Malformed(f"expected {character!r}, found {self._text[self._at]!r}")
        self._at += 1

    def value(self) -> Any:
        """Return the value that comes next, whole. Raises Cut when the text ends within it, else Malformed."""
        self.peek()
        while True:
            why = "no value"
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                end, why = error.pos, error.msg
            except (RecursionError, ValueError) as error:
                raise Malformed(str(error)) from error
            else:
                if self._is_whole(value, end):
                    self._at = end
                    return value
            if end < len(self._text) - _EDGE_CHARACTERS and not why.startswith("Unterminated"):
                raise Malformed(why)
            self._more()

    def _is_whole(self, value: Any, end: int) -> bool:
        """Return whether nothing behind `end` can belong to `value`: a number may have more digits there."""
        return isinstance(value, dict | list | str) or (end < len(self._text) and self._text[end] in _STRUCTURE)

    def resume_at(self, pattern: re.Pattern[str]) -> None:
        """Go to the end of the next match of `pattern` behind the position. Raises Cut when there is none."""
        self._at += 1
        while (found := pattern.search(self._text, self._at)) is None:
            self._at = max(self._at, len(self._text) - _EDGE_CHARACTERS)
            if not self._refill():
                raise Cut
        self._at = found.end()

    def _more(self) -> None:
        if len(self._text) - self._at > MAX_VALUE_CHARACTERS:
            raise Malformed(f"a value of more than {MAX_VALUE_CHARACTERS:,} characters")
        # Twice as much each time, so that a long value is not scanned again for every chunk.
        if not self._refill(len(self._text) - self._at):
            raise Cut

    def _refill(self, characters: int = 1) -> bool:
        """Drop what is behind the position and add as many `characters`, in chunks; return whether there were any."""
        if self._ended:
            return False
        self._count_lines()
        pieces, added = [self._text[self._at :]], 0
        while added < characters and not self._ended:
            chunk = next(self._chunks, b"")
            self._ended = not chunk
            pieces.append(self._decode(chunk, self._ended))
            added += len(pieces[-1])
        self._text = "".join(pieces)
        self._at = self._counted = 0
        return added > 0

    @property
    def line_here(self) -> int:
        """Return the line of the position, from 1."""
        self._count_lines()
        return self._line

    def _count_lines(self) -> None:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
