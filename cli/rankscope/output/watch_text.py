"""Display the states of followed logs: one line per change, and on a terminal a table with the present states."""

from __future__ import annotations

import getpass
import time
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rankscope.output.rows import printable

if TYPE_CHECKING:
    from rankscope_ingest.watch.watcher import LogStatus

_STYLES: Final = {
    "training": "green",
    "finished": "blue",
    "slow": "yellow",
    "waiting": "yellow",
    "stalled": "red",
    "failed": "red",
    "stopped": "bright_black",
}


def status_line(status: LogStatus) -> str:
    """Return the state of a log, the reason and the source of the clock as one line."""
    if status.unreadable is not None:
        return printable(f"{status.run}  {status.state}  cannot read the log: {status.unreadable}")
    parts = [
        status.reason.removeprefix(f"{status.state} "),
        *([] if not status.clock or status.clock in status.reason else [status.clock]),
    ]
    return printable(f"{status.run}  {status.state}  {'; '.join(parts)}")


class WatchView:
    """Prints a line when the state of a log changes, and on a terminal a table below these lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._statuses: dict[str, LogStatus] = {}

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the table from the terminal."""
        if self._live is not None:
            self._live.stop()

    def change(self, status: LogStatus) -> None:
        """Print a line if the state of the log has changed, and update the table."""
        before = self._statuses.get(status.address)
        self._statuses[status.address] = status
        if before is None or before.state != status.state:
            self._print(status_line(status), _STYLES.get(status.state, "red"))
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def print_line(self, line: str) -> None:
        """Print a line above the table."""
        self._console.print(Text(printable(line)), soft_wrap=True)

    def ask(self, prompt: str) -> str | None:
        """Ask for a password without echo. Return None if no password was entered."""
        if self._live is not None:
            self._live.stop()
        try:
            return getpass.getpass(printable(prompt)) or None
        except (EOFError, KeyboardInterrupt):
            return None
        finally:
            if self._live is not None:
                self._live.start()

    def _print(self, line: str, style: str) -> None:
        moment = time.strftime("%H:%M:%S")
        self._console.print(Text(f"{moment}  {line}", style=style if self._console.is_terminal else ""), soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for status in self._statuses.values():
            state = status.state
            steps = "" if status.step is None else f"step {status.step:,}"
            total = "" if status.planned_steps is None else f" / {status.planned_steps:,}"
            silence = "" if status.silence is None else f"last row {status.silence:.0f} s ago"
            cells = (printable(status.run), state, f"{steps}{total if steps else ''}", silence)
            row = [Text(cell, style=_STYLES.get(state, "red") if cell is state else "") for cell in cells]
            table.add_row(*row, Text(f"{status.values:,} values stored"))
        return table
