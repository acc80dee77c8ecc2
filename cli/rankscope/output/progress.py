"""Fetch the progress of runs from the service and display it: progress bars on a terminal, lines elsewhere.

Log messages are printed as lines above a live display.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rankscope.access.service import ClientTls, UnreachableError, request
from rankscope.output.rows import printable
from rankscope.shell.streams import masked
from rankscope_contract.model.events import RunState
from rankscope_contract.model.redaction import MAX_LABEL, redacted_text
from rankscope_contract.wire.channel import RUNS_PATH
from rankscope_ingest.live.progress import RunProgress

TIMEOUT_SECONDS: Final = 2.0
LINE_INTERVAL_SECONDS: Final = 5.0
MAX_BARS: Final = 6

_FIELDS: Final = {field.name: str(field.type) for field in dataclasses.fields(RunProgress)}


def fetch_runs(
    service_url: str, *, token: str | None = None, client_tls: ClientTls | None = None
) -> list[RunProgress] | None:
    """Return the progress of all runs of the service; None if the service does not return a list."""
    try:
        response = request(service_url + RUNS_PATH, token=token, timeout_seconds=TIMEOUT_SECONDS, client_tls=client_tls)
    except UnreachableError:
        return None
    document = response.json() if response.status == 200 else None
    if not isinstance(document, list):
        return None
    return [_progress(run) for run in document]


def _progress(run: Mapping[str, Any]) -> RunProgress:
    """Return the progress of one run, from an entry in the response of the service.

    Fields that this release does not know are ignored. The service writes NaN and Inf as strings.
    """
    known = {key: value for key, value in run.items() if key in _FIELDS}
    texts = {key: value for key, value in known.items() if isinstance(value, str) and "float" in _FIELDS[key]}
    return RunProgress(**known | {key: float(value) for key, value in texts.items()})


class ProgressView(Live):
    """A display of the progress of runs that can also print lines.

    On a terminal, it has a progress bar and a line of numbers for each live run. For a file or a pipe, it prints a line
    for a run when its state changes, or its step, but lines about steps at most every `every_seconds` seconds.
    """

    def __init__(self, console: Console, *, every_seconds: float = LINE_INTERVAL_SECONDS) -> None:
        waiting = Text("waiting for ranks")
        super().__init__(waiting, console=console, auto_refresh=False, transient=not console.is_terminal)
        self._every_seconds = every_seconds
        self._last: dict[str, tuple[float, int | None, str]] = {}

    def show(self, runs: Sequence[RunProgress], now: float) -> None:
        """Update the display with the current state of `runs`. If no run is live, the last one has a bar.

        `now` is a time in seconds of any clock; only differences matter.
        """
        if not self.console.is_terminal:
            self._print_changes(runs, now)
        elif shown := [run for run in runs if run.ranks_alive][:MAX_BARS] or runs[-1:]:
            self.update(Group(*(part for run in shown for part in _bar(run))), refresh=True)

    def print_line(self, line: str) -> None:
        """Print a line that remains on the screen, above the bars."""
        self.console.print(Text(masked(line)), soft_wrap=True)

    def _print_changes(self, runs: Sequence[RunProgress], now: float) -> None:
        for run in runs:
            at, step, state = self._last.get(run.run, (-math.inf, None, ""))
            moved = run.step != step and now - at >= self._every_seconds
            if run.step is not None and run.state != RunState.PENDING and (moved or run.state != state):
                self._last[run.run] = (now, run.step, run.state)
                self.print_line(f"{printable(run.run)} {run.state}  {'  '.join(progress_parts(run))}")


def _bar(run: RunProgress) -> Iterator[Table | Text]:
    row = Table.grid(padding=(0, 1))
    done = ProgressBar(total=run.planned_steps, completed=run.step or 0, width=30)
    left = "" if run.eta_seconds is None or not run.ranks_alive else f"{_duration(run.eta_seconds)} left"
    row.add_row(Text(printable(run.run), style="bold"), Text(printable(run.state)), done, Text(_steps(run)), Text(left))
    yield row
    yield Text("  " + "  ".join(figures(run)), no_wrap=True, overflow="ellipsis")


def progress_parts(run: RunProgress) -> Iterator[str]:
    """Yield the known facts of a run as texts: step, figures, time left."""
    if run.step is not None:
        yield _steps(run)
    yield from figures(run)
    if run.eta_seconds is not None and run.ranks_alive:
        yield f"{_duration(run.eta_seconds)} left"


def figures(run: RunProgress) -> Iterator[str]:
    """Yield the known figures of a run as texts: loss, throughput, rows stored, lag, live ranks and lost records."""
    if run.loss is not None:
        yield f"loss {run.loss:.4f}{run.loss_note}".replace("nan", "NaN")
    if run.tokens_per_second is not None:
        yield f"{run.tokens_per_second:,.0f} tokens/s"
    yield f"{run.rows_stored:,} row{'' if run.rows_stored == 1 else 's'} stored"
    if run.ranks_alive:  # afterwards, it is the number of records that wait for the last commit
        yield f"lag {run.lag_records}"
    yield f"{run.ranks_alive}/{run.world_size} ranks"
    if run.records_lost:
        yield f"{run.records_lost} record{'' if run.records_lost == 1 else 's'} LOST"


def _steps(run: RunProgress) -> str:
    if run.step is None:
        return "no step yet"
    return f"step {run.step}" + (f"/{run.planned_steps}" if run.planned_steps else "")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes}:{rest:02}"


class LineHandler(logging.Handler):
    """A log handler that prints log records above the progress bars, so that they do not disturb the bars."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._print_line = print_line

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line with the level, the message and the context of `record`."""
        fields = ((key, value) for key, value in vars(record).items() if key not in _RECORD_FIELDS)
        about = "".join(f", {key} {value}" for key, value in fields if value is not None)
        line = redacted_text(f"{record.levelname.lower()}: {record.getMessage()}{about}", MAX_LABEL)
        self._print_line(printable(line))


_RECORD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "taskName"}
"""Attributes that every log record has. All other attributes of a record are its context and are printed."""


@contextlib.contextmanager
def log_to(print_line: Callable[[str], None]) -> Iterator[None]:
    """Print the log messages of the service and of the store with `print_line` in the body of the context."""
    handler = LineHandler(print_line)
    loggers = [logging.getLogger(name) for name in ("rankscope_ingest", "rankscope_storage", "rankscope_contract")]
    loggers[0].setLevel(logging.INFO)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
