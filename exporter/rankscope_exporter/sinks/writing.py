"""Files that hold whole writes, whatever stops the process: what is left is read by the next, or continued by it.

Nothing stays open between two writes: a forked child inherits nothing that it could write, and a file that was moved
away is begun anew.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_PORTION: Final = 4096


def create(path: Path, data: bytes) -> None:
    """Make the file at `path`; it is there with all of `data` or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb", buffering=0) as file:
            _write_all(file.fileno(), data)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def append(path: Path, data: bytes, *, lines: bool = False) -> None:
    """Add to the file at `path` all of `data` or, where that fails, nothing. Raises FileNotFoundError.

    Of a file of `lines` whose last one has no line feed, that one is what a killed writer left, and is taken away.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        end = os.lseek(descriptor, 0, os.SEEK_END)
        size = _whole_lines(descriptor, end) if lines else end
        try:
            if size != end:
                os.ftruncate(descriptor, size)
                os.lseek(descriptor, size, os.SEEK_SET)
            _write_all(descriptor, data)
        except BaseException:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def first_line(path: Path) -> bytes | None:
    """Return the first line of a file with its line feed; None where there is no file."""
    try:
        with path.open("rb") as file:
            return file.readline(_PORTION)
    except FileNotFoundError:
        return None


def _whole_lines(descriptor: int, end: int) -> int:
    """Return where the last whole line ends."""
    while end:
        start = max(0, end - _PORTION)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
