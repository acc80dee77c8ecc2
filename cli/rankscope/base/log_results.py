"""Show the progress and the results of the import of one, a few or many logs."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from rankscope.base.terminal import live_console, masked

if TYPE_CHECKING:
    from rankscope_ingest.importers import ImportReport

LISTED_LOGS: Final = 20
"""Largest number of logs of which each result is printed, and largest number of printed messages about more logs."""

ProgressOf = Callable[[Path], AbstractContextManager[Callable[[int], None] | None]]
"""A function that begins to show the progress of a log.

The context has a function that gets the number of bytes of the log that were read, or None if nothing is shown.
"""


def print_some(messages: Sequence[str], *, all_of_them: bool = False) -> None:
    """Print the first 20 messages to standard error, or all, and the number of the others."""
    shown = len(messages) if all_of_them else LISTED_LOGS
    for message in messages[:shown]:
        print(message, file=sys.stderr)
    if len(messages) > shown:
        print(f"{len(messages) - shown:,} more messages are not printed", file=sys.stderr)


class ImportResults:
    """The results of an import of `count` logs, which are printed when the rows of the logs are stored.

    Results are printed to `out`, unless it is None, and messages about faults to standard error. `shown` is the largest
    number of printed faults of a log; with None, the result of each log is printed, too.
    """

    def __init__(self, count: int, shown: int | None, out: TextIO | None) -> None:
        self.failures: list[str] = []
        self.is_brief = count > LISTED_LOGS and shown is not None
        self._shown = shown
        self._out = out
        self._waiting: list[tuple[Path, ImportReport]] = []
        self._messages: list[str] = []
        self._logs: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._runs: set[str] = set()

    def add(self, path: Path, report: ImportReport) -> None:
        """Add the result of the log at `path`, whose rows may not be stored yet."""
        self._waiting.append((path, report))
        if not report.records and report.last_step is None:
            self.failures.append(
                f"{path} contains no record in the format {report.source_kind}: `rankscope import {path} --explain` "
                "prints the detected formats, `--format` selects another one"
            )

    def print_stored(self) -> None:
        """Print the results of the added logs, of which all rows are stored now. Of many logs, only count them."""
        for path, report in self._waiting:
            if self.is_brief:
                self._count(report)
                self._messages += _messages(path, report, self._shown)
                continue
            if self._out is not None:
                print(_result(path, report), file=self._out)
            print_some(_messages(path, report, self._shown), all_of_them=True)
        self._waiting.clear()

    def stop(self) -> None:
        """End an import that an error interrupts: print the results of the stored logs, and the failures so far."""
        self._waiting.clear()
        self.finish()
        print_some([f"rankscope: {failure}" for failure in self.failures], all_of_them=True)

    def finish(self) -> None:
        """Print the results of all logs whose results were not printed yet."""
        self.print_stored()
        if not self.is_brief:
            return
        if self._out is not None and self._logs:
            formats = ", ".join(f"{count:,} {kind}" for kind, count in self._logs.most_common())
            rows, records, runs = self._totals["new rows"], self._totals["records"], len(self._runs)
            names = ("anomalies", "lines without records", "unchanged logs", "replaced logs")
            rest = _in_brackets(f"{self._totals[name]:,} {name}" for name in names if self._totals[name])
            counted = f"{formats}; {records:,} records; {rows:,} new rows in {runs:,} {'run' if runs == 1 else 'runs'}"
            print(f"{self._logs.total():,} logs: {counted}{rest}", file=self._out)
        print_some(self._messages)

    def _count(self, report: ImportReport) -> None:
        self._logs[report.source_kind] += 1
        self._runs.add(report.run)
        self._totals += {
            "records": report.records,
            "new rows": report.rows_stored,
            "anomalies": report.anomalies,
            "lines without records": report.passed_over,
            "unchanged logs": int(report.is_unchanged),
            "replaced logs": int(report.is_replacement),
        }


def _other(known: str, path: Path) -> str:
    return "its earlier import" if known == str(path.absolute()) else known


def _result(path: Path, report: ImportReport) -> str:
    steps = "" if report.last_step is None else f", up to step {report.last_step:,}"
    imported = f"{report.source_kind}, {report.records:,} records{steps}"
    details = [
        f"{report.attempts:,} attempts" if report.attempts > 1 else "",
        f"{report.anomalies:,} anomalies" if report.anomalies else "",
        f"{report.passed_over:,} lines without records" if report.passed_over else "",
        "replaces another log at this path" if report.is_replacement else "",
        "unchanged since the last import" if report.is_unchanged else "",
    ]
    rest = _in_brackets(filter(None, details))
    failure = f"; failed: {report.reason}" if report.state == "failed" else ""
    return f"{path}: {imported}; {report.rows_stored:,} new rows in {report.run}{rest}{failure}"


def _in_brackets(details: Iterable[str]) -> str:
    text = ", ".join(details)
    return f" ({text})" if text else ""


def _messages(path: Path, report: ImportReport, shown: int | None) -> list[str]:
    """Return the messages about one log. `shown` is the largest number of faults that are part of a message."""
    messages = [f"{path}: {note}" for note in report.notes]
    if report.branches_from is not None:
        messages.append(
            f"{path}: differs from {_other(report.branches_from, path)} from step {report.first_step} on; "
            f"its steps from there on are attempt {report.attempt} and supersede these steps of earlier imports"
        )
    if report.imported_from is not None:
        messages.append(
            f"{path}: ranks have reported data of {report.run}; the log is kept apart from it, with the label "
            f"imported_from={report.imported_from}"
        )
    if report.left_out:
        messages.append(
            f"{path}: {report.left_out:,} rows without labels, such as tensor statistics, are left out; "
            "to store them, import the log as another run with --run"
        )
    if report.is_unchanged and report.malformed:
        messages.append(f"{path}: {report.malformed:,} malformed lines at the last import")
    elif report.malformed:
        lines = "; ".join(f"line {fault.line:,}: {fault.text}" for fault in report.faults[:shown])
        messages.append(f"{path}: {report.malformed:,} malformed lines ({lines})")
    return messages


@contextlib.contextmanager
def progress_of(paths: Sequence[Path], *, is_brief: bool) -> Iterator[ProgressOf]:
    """Yield a function that shows a progress bar of the bytes read of each log on a terminal, and nothing elsewhere.

    With `is_brief`, one bar shows the progress of all logs at `paths`.
    """
    if not sys.stderr.isatty():
        yield lambda _: contextlib.nullcontext()
    elif not is_brief:
        yield lambda path: _bar(path.name, _size(path))
    else:
        sizes = {path: _size(path) for path in paths}
        with _bar(f"{len(paths):,} logs", sum(sizes.values())) as show:
            before = 0

            @contextlib.contextmanager
            def part(path: Path) -> Iterator[Callable[[int], None] | None]:
                nonlocal before
                yield None if show is None else lambda done: show(before + done)
                before += sizes[path]

            yield part


def _size(path: Path) -> int:
    """Return the number of bytes of a file; 0 for a folder, whose progress is not known."""
    with contextlib.suppress(OSError):
        return path.stat().st_size if path.is_file() else 0
    return 0


@contextlib.contextmanager
def _bar(label: str, size: int) -> Iterator[Callable[[int], None] | None]:
    if not size:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=live_console(sys.stderr), transient=True) as bar:
        task = bar.add_task(masked(label), total=size)
        yield lambda done: bar.update(task, completed=done)
