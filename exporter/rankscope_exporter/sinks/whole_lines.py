"""Files of whole lines: what a process that is killed at any moment leaves is read by the next, or continued by it.

Nothing stays open between two writes: a forked child inherits nothing that it could write, and a file that was moved
away is begun anew.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_PORTION: Final = 4096


def create(path: Path, text: str) -> None:
    """Make the file at `path`; it is there with all of `text` or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb", buffering=0) as file:
            _write_all(file.fileno(), text.encode("utf-8", "replace"))
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def append(path: Path, text: str) -> None:
    """Add lines to the file at `path`, all of `text` or, where that fails, nothing. Raises FileNotFoundError.

    Without a line feed at the end of the file, its last line is what a killed writer left of a row, and is taken away.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = _whole(descriptor)
        if size != os.lseek(descriptor, 0, os.SEEK_END):
            os.ftruncate(descriptor, size)
            os.lseek(descriptor, size, os.SEEK_SET)
        try:
            _write_all(descriptor, text.encode("utf-8", "replace"))
        except BaseException:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def first_line(path: Path) -> str | None:
    """Return the first line of a file with its line feed; None where there is no file."""
    try:
        with path.open("rb") as file:
            return file.readline(_PORTION).decode("utf-8", "replace")
    except FileNotFoundError:
        return None


def _whole(descriptor: int) -> int:
    """Return where the last whole line of a file ends."""
    end = os.fstat(descriptor).st_size
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
