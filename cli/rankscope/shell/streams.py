"""Standard output and error of a command: escape sequences in names are masked, and a service outlives its terminal."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_CONTROL: Final = "[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
_MASKED: Final = re.compile(_CONTROL)
_MASKED_ON_TERMINALS: Final = re.compile(rf"(?!\x1b\[[0-9;]*m){_CONTROL}")
"""Characters that are masked: control characters, those that change the direction of text, and lone surrogates.

A terminal receives styles, with which typer prints the help.
"""


def masked(text: str, pattern: re.Pattern[str] = _MASKED) -> str:
    """Return `text` with control characters escaped, so that a name cannot control a terminal. Lines remain."""
    return pattern.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _LossyFile(io.FileIO):
    """Standard output or error of a service, which continues if its reader has exited or hangs, or the disk is full."""

    _patience = 1.0

    def write(self, data: Any) -> int:
        """Write at most as many bytes as a pipe takes in one write, or discard all. Return how many were handled."""
        left = memoryview(data)
        with contextlib.suppress(OSError):
            self._patience = float(bool(select.select([], [self], [], self._patience)[1]))
            if self._patience:
                return super().write(left[: select.PIPE_BUF]) or 0
        return len(left)


class _Output(io.TextIOWrapper):
    """Standard output or error, with control characters masked. `unmasked` is the same file for live displays."""

    def __init__(self, replaced: io.TextIOWrapper, *, is_lossy: bool) -> None:
        kind = _LossyFile if is_lossy else io.FileIO
        buffer = io.BufferedWriter(kind(replaced.fileno(), "w", closefd=False))
        is_flushed = is_lossy or replaced.line_buffering
        super().__init__(buffer, replaced.encoding, "backslashreplace", line_buffering=is_flushed)
        self._replaced = replaced  # it would close the file
        self.unmasked = io.TextIOWrapper(buffer, replaced.encoding, "backslashreplace")
        self._pattern = _MASKED_ON_TERMINALS if self.isatty() else _MASKED

    def write(self, text: str) -> int:
        """Write `text` with control characters escaped."""
        return super().write(masked(text, self._pattern))


def prepare_streams(*, is_service: bool) -> None:
    """Mask what a command prints, and discard what a service cannot print.

    A standard stream that is closed, as a timer or a daemon may start a command, becomes the null device. Otherwise a
    file of a store gets the number of the closed stream, and output is written into this file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - open until the process exits
            os.set_inheritable(stream.fileno(), True)  # the processes that a command starts have the same streams
            setattr(sys, name, stream)
        if mode == "w":
            setattr(sys, name, _Output(getattr(sys, name), is_lossy=is_service))


def live_console(stream: TextIO) -> Console:
    """Return a console for a live display, which moves the cursor of a terminal. Its texts must be `masked`."""
    from rich.console import Console

    if isinstance(stream, _Output) and stream.isatty():
        stream = stream.unmasked
    return Console(file=stream, highlight=False)


@contextlib.contextmanager
def progress_bar(unit: str, description: str = "") -> Iterator[Callable[[int, int], None]]:
    """Yield a function that displays two numbers in a progress bar: completed items and all items.

    `unit` is the name of the items; bytes are shown as kB, MB and so on. Without a terminal, the function does nothing.
    """
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = live_console(sys.stderr)
    text = TextColumn("{task.description}", markup=False)
    numbers = (DownloadColumn(),) if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))
    columns = (text, BarColumn(), *numbers, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(masked(description), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
