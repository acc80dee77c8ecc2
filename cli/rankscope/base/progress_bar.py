"""A progress bar on standard error, which only a terminal shows."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rankscope.base.terminal import live_console, masked


@contextlib.contextmanager
def progress_bar(unit: str, description: str = "") -> Iterator[Callable[[int, int], None]]:
    """Yield a function that displays two numbers in a progress bar: completed items and all items.

    `unit` is the name of the items. Without a terminal, the function does nothing.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = live_console(sys.stderr)
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(masked(description), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
