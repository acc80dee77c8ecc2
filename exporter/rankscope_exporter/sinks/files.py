"""Output folders of sinks, the steps and names in them, and files that contain only complete writes.

Whatever stops the process, the next process can read the file or continue it. No file stays open between two writes: a
forked child inherits nothing that it could write, and a file that was moved away is begun anew.
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


FOLDER_VARIABLE: Final = "MONITOR_OUTPUT_DIR"
DEFAULT_FOLDER: Final = "./monitor_output"


def output_folder(given: str | None, environment: Mapping[str, str] = os.environ) -> Path:
    """Return where output goes, an absolute path: the training may change its working directory."""
    path = Path(given or environment.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)
    with contextlib.suppress(RuntimeError):  # nobody of that name: the folder is called so
        path = path.expanduser()
    return path.absolute()


def check_folder(folder: Any) -> None:
    """Raise ValueError for what is no path."""
    if folder is not None and not (isinstance(folder, str) and folder and "\0" not in folder):
        raise ValueError(f"folder is a path, not {folder!r}; without it {FOLDER_VARIABLE} or {DEFAULT_FOLDER}")


def check_truth(name: str, value: Any) -> None:
    """Raise ValueError for what is neither true nor false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is true or false, not {value!r}")  # noqa: TRY004 - becomes a ConfigError


def chosen_ops(ops: Any) -> tuple[str, ...]:
    """Return the statistics that `ops` names, in its order. Raises ValueError."""
    if isinstance(ops, str) or not isinstance(ops, Sequence) or not ops:
        raise ValueError(f"ops is a list of some of {', '.join(OPS)}, not {ops!r}")
    for op in ops:
        if op not in OPS:
            near = difflib.get_close_matches(str(op), OPS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"ops: {op!r} is unknown, there are {', '.join(OPS)}{hint}")
    if len(set(ops)) < len(ops):
        raise ValueError(f"ops names one of {', '.join(ops)} twice")
    return tuple(ops)


class Numbering:
    """How the steps of this process are numbered: the tool's first is 0, ours is 1 unless a step 0 came first."""

    def __init__(self) -> None:
        self._first: int | None = None

    def first(self, record: StepRecord) -> int:
        """Return our number of the tool's step 0; decided by the first record that has a step."""
        if self._first is None:
            if record.step is None:
                return 1
            self._first = 0 if record.step == 0 else 1
        return self._first


def naming(*, squash: bool) -> Callable[[str, bool], str]:
    """Return how parameters and modules are called in the output, each sort with names of its own."""
    if not squash:
        return lambda name, _is_module: name
    parameters, modules = Squash(), Squash()
    return lambda name, is_module: modules(name) if is_module else parameters(name)
