"""Output folders of sinks, and file writes that are complete or have no effect.

Whether the process ends normally or is killed, the next process can read or continue a file. No file is open between
two writes: a forked child inherits no open file, and a file that was moved is created again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

from rankscope_exporter.process.validation import Allowed

_PORTION: Final = 4096


def create(path: Path, data: bytes) -> None:
    """Create the file at `path` with all of `data`. If that fails, no file is created."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb", buffering=0) as file:
            _write_all(file.fileno(), data)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def append(path: Path, data: bytes, *, lines: bool = False) -> None:
    """Append all of `data` to the file at `path`.

    If that fails, the file remains unchanged. Raises FileNotFoundError if there is no file.

    With `lines`, a last line without a line feed is removed first, because a killed process wrote only a part of it.
    """
    with path.open("r+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        size = _whole_lines(file.fileno(), end) if lines else end
        try:
            file.truncate(size)
            file.seek(size)
            _write_all(file.fileno(), data)
        except BaseException:
            file.truncate(size)
            raise


def first_line(path: Path) -> bytes | None:
    """Return the first line of the file at `path`, including its line feed; None if the file does not exist."""
    try:
        with path.open("rb") as file:
            return file.readline(_PORTION)
    except FileNotFoundError:
        return None


def _whole_lines(descriptor: int, end: int) -> int:
    """Return the offset in bytes of the end of the last complete line of a file."""
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


FOLDER_VARIABLE: Final = "MONITOR_OUTPUT_DIR"
DEFAULT_FOLDER: Final = "./monitor_output"


def output_folder(given: str | None, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the output folder as an absolute path, because the training may change its working directory."""
    path = Path(given or environment.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)
    with contextlib.suppress(RuntimeError):  # no such user: the name of the folder begins with ~
        path = path.expanduser()
    return path.absolute()


Folder = Annotated[
    str,
    Allowed(
        "a path",
        lambda value: isinstance(value, str) and value != "" and "\0" not in value,
        f"; the default is the variable {FOLDER_VARIABLE}, or else {DEFAULT_FOLDER}",
    ),
]
"""Annotated type of a setting that contains the path of an output folder."""
