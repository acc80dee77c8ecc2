"""Find logs of other tools, import them into a store, and print the results, for the commands that accept logs."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from rankscope.shell.errors import USAGE, CommandError, suggestion
from rankscope.shell.streams import progress_bar

if TYPE_CHECKING:
    from rankscope_contract.rules import AnomalyRule
    from rankscope_ingest.importers import Choices, Importer, ImportReport, LogGroup, Options
    from rankscope_storage.base.location import Location

LISTED_LOGS: Final = 20
"""Largest number of logs of which each result is printed, and largest number of printed messages about more logs."""


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
        self._stored: list[tuple[Path, ImportReport]] = []

    def add(self, path: Path, report: ImportReport) -> None:
        """Add the result of the log at `path`, whose rows may not be stored yet."""
        self._waiting.append((path, report))
        if not report.records and report.last_step is None:
            self.failures.append(
                f"{path} contains no record in the format {report.source_kind}: `rankscope import {path} --explain` "
                "prints the detected formats, `--format` selects another one"
            )
        elif report.records and not (report.has_numbers or report.is_known):
            self.failures.append(
                f"{path}: no number was found in {report.records:,} records of the format {report.source_kind}"
            )

    def print_stored(self) -> None:
        """Print the results of the added logs, of which all rows are stored now. Of many logs, only keep them."""
        stored, self._waiting = self._waiting, []
        self._stored += stored
        for path, report in [] if self.is_brief else stored:
            if self._out is not None:
                print(_result(path, report), file=self._out)
            print_some(_messages(path, report, self._shown), all_of_them=True)

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
        if self._out is not None and self._stored:
            print(_totals([report for _, report in self._stored]), file=self._out)
        print_some([message for path, report in self._stored for message in _messages(path, report, self._shown)])


def _totals(reports: Sequence[ImportReport]) -> str:
    formats = Counter(report.source_kind for report in reports).most_common()
    counted = ", ".join(f"{count:,} {kind}" for kind, count in formats)
    runs = len({report.run for report in reports})
    rows = f"{sum(report.rows_stored for report in reports):,} new rows in {runs:,} {'run' if runs == 1 else 'runs'}"
    others = {
        "anomalies": sum(report.anomalies for report in reports),
        "lines without records": sum(report.passed_over for report in reports),
        "unchanged logs": sum(report.is_unchanged for report in reports),
        "replaced logs": sum(report.is_replacement for report in reports),
    }
    rest = _in_brackets(f"{count:,} {name}" for name, count in others.items() if count)
    records = sum(report.records for report in reports)
    return f"{len(reports):,} logs: {counted}; {records:,} records; {rows}{rest}"


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
        other = "its earlier import" if report.branches_from == str(path.absolute()) else report.branches_from
        messages.append(
            f"{path}: differs from {other} from step {report.first_step} on; "
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
def _progress_of(path: Path, label: str) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that shows how many bytes of a log were read; None without a terminal, and for a folder."""
    size = path.stat().st_size if path.is_file() else 0
    if not size or not sys.stderr.isatty():
        yield None
        return
    with progress_bar("bytes", label) as show:
        yield lambda done: show(done, size)


SHOWN_FAULTS: Final = 3
TIME_ZONE: Final = "UTC+8"
"""Default time zone of the folder names of msprobe."""


@dataclass(frozen=True, slots=True)
class Log:
    """A log to import: its file or folder, its importer and the name of its run."""

    path: Path
    importer: Importer
    run: str
    choices: Choices | None = None
    """The decision about the log, which --reimport has derived from all of its records."""


def plan_logs(
    paths: Sequence[Path], chosen: Importer | None, run: str | None, time_zone: str
) -> tuple[list[Log], list[str]]:
    """Return the logs at `paths`, and a message for each path that is no readable log.

    A log that has later steps than the checkpoints next to it is imported as a separate run, because the log repeats
    the steps of the checkpoints. Raises CommandError if no run can have the name `run`.
    """
    from rankscope_contract.model.identity import check_run_name
    from rankscope_ingest.base.errors import IngestError
    from rankscope_ingest.importers import newer_log, run_name

    try:
        run = check_run_name(run or "")
    except ValueError as error:
        raise CommandError(f"--run: {error}", code=USAGE) from error
    plan: list[Log] = []
    failures = []
    notes: list[str] = []
    for path in paths:
        try:
            plan += [
                Log(log, _in_time_zone(importer, time_zone), run or run_name(log))
                for log, importer in _logs(path, chosen, notes)
            ]
            newer = newer_log(path) if path.is_dir() and plan[-1].importer.name == "trainer_state" else None
            if newer is not None:
                plan.append(Log(newer, named_importer("jsonl"), f"{plan[-1].run}-{newer.stem}"))
                notes.append(f"{newer} has later steps than {path}: imported as the run {plan[-1].run}")
        except IngestError as error:
            failures.append(str(error))
    print_some(notes)
    return plan, failures


def import_logs(
    plan: Sequence[Log],
    store: Location,
    shard: str,
    *,
    rules: Sequence[AnomalyRule],
    shown: int | None,
    options: Options,
    out: TextIO | None,
) -> list[str]:
    """Import the logs in `plan`, and return a message for each that cannot be read or contains no record.

    Small logs are stored together. The results are printed to `out`, unless it is None, and faults to standard error,
    both after they are stored: if the store fails, the results of the logs that are stored. `shown` is the largest
    number of printed faults of a log; with None, the result of each of many logs is printed too.
    """
    from rankscope_ingest.importers import GROUP_LOGS, LogGroup
    from rankscope_storage.api.store import Store as StoreFolder
    from rankscope_storage.api.store import is_store
    from rankscope_storage.base.errors import StoreError
    from rankscope_storage.connection import connect

    is_new = not is_store(store)
    owner = f"import, process {os.getpid()} on {socket.gethostname()}"
    results = ImportResults(len(plan), shown, out)
    with (
        StoreFolder.open(store, create=True).claim(shard, owner=owner) as writer,
        contextlib.ExitStack() as stack,
    ):
        connection = functools.cache(lambda: stack.enter_context(connect(store)))
        group = LogGroup(writer, connection, on_stored=results.print_stored, is_new=is_new)
        try:
            for number, log in enumerate(plan):
                if number % GROUP_LOGS == 0:
                    group.begin({each.run for each in plan[number : number + GROUP_LOGS]})
                label = f"log {number + 1:,} of {len(plan):,}: {log.path.name}"
                _import_log(log, group, rules, options, results, label)
                if group.is_stored:
                    results.print_stored()
            group.flush()
        except BaseException as error:
            try:
                if not isinstance(error, StoreError):  # also of the user: the logs that were read completely are stored
                    group.flush()
            finally:
                results.stop()
            raise
    results.finish()
    return results.failures


def _import_log(
    log: Log, group: LogGroup, rules: Sequence[AnomalyRule], options: Options, results: ImportResults, label: str
) -> None:
    from rankscope_ingest.base.errors import IngestError
    from rankscope_ingest.importers import import_records

    try:
        with _progress_of(log.path, label) as show:
            report = import_records(
                log.path,
                group,
                log.importer,
                run=log.run,
                progress=show,
                known=group.known(log.run),
                rules=rules,
                is_live=group.is_live(log.run),
                stored=group.stored(log.run),
                options=options,
                choices=log.choices,
            )
    except IngestError as error:
        results.failures.append(str(error))
    else:
        results.add(log.path, report)


def named_importer(name: str) -> Importer:
    """Return the importer `name`. Raises CommandError, which lists the known formats, if there is none."""
    from rankscope_ingest.importers import importers

    known = importers()
    if name not in known:
        hint = suggestion(name, known)
        raise CommandError(f"unknown format {name!r}; known formats: {', '.join(sorted(known))}.{hint}", code=USAGE)
    return known[name]


def _in_time_zone(importer: Importer, time_zone: str) -> Importer:
    from rankscope_ingest.importers.msprobe import Msprobe
    from rankscope_msprobe.files.csv_layout import check_time_zone

    try:
        check_time_zone(time_zone)
    except ValueError as error:
        raise CommandError(f"--time-zone: {error}", code=USAGE) from error
    return Msprobe(time_zone) if isinstance(importer, Msprobe) else importer


def _logs(path: Path, chosen: Importer | None, notes: list[str]) -> Iterator[tuple[Path, Importer]]:
    """Yield each log with its importer.

    If `path` is a log (a file or a folder), it is the only log. Otherwise the logs are the files in the folder `path`;
    messages about the other files are added to `notes`.
    """
    from rankscope_ingest.base.errors import IngestError
    from rankscope_ingest.importers import find_importer

    if chosen is not None:
        yield path, chosen
        return
    try:
        yield path, find_importer(path)
    except IngestError:
        if not path.is_dir():
            raise
        found, others = [], []
        for file in sorted(file for file in path.iterdir() if file.is_file()):
            try:
                found.append((file, find_importer(file)))
            except IngestError as error:  # the folder may contain other files
                others.append(str(error))
        if not found:
            raise
        notes += [f"not imported: {other}" for other in others]
        yield from found
