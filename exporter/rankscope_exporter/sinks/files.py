"""Output folders of sinks, step numbers and names in their files, and file writes that are complete or have no effect.

However the process ends, the next process can read or continue a file. No file is open between two writes: a forked
child inherits no open file, and a file that was moved is created again.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rankscope_contract.msprobe.csv_layout import OPS
from rankscope_contract.msprobe.names import Squash
from rankscope_exporter.records.step_record import StepRecord

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


def check_folder(folder: Any) -> None:
    """Raise ValueError if a value of the setting `folder` is not a path."""
    if folder is not None and not (isinstance(folder, str) and folder and "\0" not in folder):
        raise ValueError(f"folder must be a path, not {folder!r}; the default is {FOLDER_VARIABLE} or {DEFAULT_FOLDER}")


def check_truth(name: str, value: Any) -> None:
    """Raise ValueError if a value of a setting is not a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")  # noqa: TRY004 - becomes a ConfigError


def chosen_ops(ops: Any) -> tuple[str, ...]:
    """Return the statistics that the setting `ops` names, in the same order.

    Raises ValueError for an unknown or repeated name.
    """
    if isinstance(ops, str) or not isinstance(ops, Sequence) or not ops:
        raise ValueError(f"ops must be a list of some of {', '.join(OPS)}, not {ops!r}")
    for op in ops:
        if op not in OPS:
            near = difflib.get_close_matches(str(op), OPS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"ops: {op!r} is unknown; valid names are {', '.join(OPS)}{hint}")
    if len(set(ops)) < len(ops):
        raise ValueError(f"ops contains a statistic twice: {', '.join(ops)}")
    return tuple(ops)


class Numbering:
    """The step numbers of this process in msprobe and in Rankscope.

    The first step is 0 in msprobe. In Rankscope it is 1, or 0 if a step 0 is recorded first.
    """

    def __init__(self) -> None:
        self._first: int | None = None

    def first(self, record: StepRecord) -> int:
        """Return the number in Rankscope of msprobe's step 0. The first record with a step determines this number."""
        if self._first is None:
            if record.step is None:
                return 1
            self._first = 0 if record.step == 0 else 1
        return self._first


def naming(*, squash: bool) -> Callable[[str, bool], str]:
    """Return a function that converts names of parameters and modules to names in the output.

    The second argument of the function is True for the name of a module. A shortened name is unique among the
    parameters or among the modules, not among both.
    """
    if not squash:
        return lambda name, _is_module: name
    parameters, modules = Squash(), Squash()
    return lambda name, is_module: modules(name) if is_module else parameters(name)
