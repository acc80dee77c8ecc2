"""Find logs of other tools, import them into a store, and print the results, for the commands that accept logs."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from rankscope.base.errors import USAGE, CommandError, suggestion

if TYPE_CHECKING:
    from rankscope_contract.rules import AnomalyRule
    from rankscope_ingest.importers import Importer, ImportReport, Options

SHOWN_FAULTS: Final = 3
TIME_ZONE: Final = "UTC+8"
"""Default time zone of the folder names of msprobe."""


@dataclass(frozen=True, slots=True)
class Log:
    """A log to import: its file or folder, its importer and the name of its run."""

    path: Path
    importer: Importer
    run: str


def plan_logs(
    paths: Sequence[Path], chosen: Importer | None, run: str | None, time_zone: str
) -> tuple[list[Log], list[str]]:
    """Return the logs at `paths`, and a message for each path that is no readable log.

    A log that has later steps than the checkpoints next to it is imported as a separate run, because the log repeats
    the steps of the checkpoints.
    """
    from rankscope_ingest.base.errors import IngestError
    from rankscope_ingest.importers import newer_log, run_name

    plan: list[Log] = []
    failures = []
    for path in paths:
        try:
            plan += [
                Log(log, _in_time_zone(importer, time_zone), run or run_name(log))
                for log, importer in _logs(path, chosen)
            ]
            newer = newer_log(path) if path.is_dir() and plan[-1].importer.name == "trainer_state" else None
            if newer is not None:
                plan.append(Log(newer, named_importer("jsonl"), f"{plan[-1].run}-{newer.stem}"))
                print(f"{newer} has later steps than {path}: imported as the run {plan[-1].run}", file=sys.stderr)
        except IngestError as error:
            failures.append(str(error))
    return plan, failures


def import_logs(
    plan: Sequence[Log],
    store: Path,
    shard: str,
    *,
    rules: Sequence[AnomalyRule],
    shown: int | None,
    options: Options,
    out: TextIO | None,
) -> list[str]:
    """Import the logs in `plan`, and return a message for each that cannot be read or contains no record.

    The result of each import is printed to `out`, unless it is None, and its faults to standard error. `shown` is the
    largest number of printed faults of a log.
    """
    from rankscope_ingest.base.errors import IngestError
    from rankscope_ingest.importers import import_records, is_live, known_imports, stored_scalars
    from rankscope_storage.api.store import Store as StoreFolder
    from rankscope_storage.connection import connect

    owner = f"import, process {os.getpid()} on {socket.gethostname()}"
    failures = []
    with StoreFolder.open(store, create=True).claim(shard, owner=owner) as writer, connect(store) as connection:
        for log in plan:
            known = known_imports(connection, log.run)
            try:
                with _progress(log.path) as progress:
                    report = import_records(
                        log.path,
                        writer,
                        log.importer,
                        run=log.run,
                        progress=progress,
                        known=known,
                        rules=rules,
                        is_live=is_live(connection, log.run),
                        stored=stored_scalars(connection, log.run),
                        options=options,
                    )
            except IngestError as error:
                failures.append(str(error))
                continue
            _print_report(log.path, report, shown, out)
            if not report.records:
                failures.append(
                    f"{log.path} contains no record in the format {report.source_kind}: `rankscope import {log.path} "
                    "--explain` prints the detected formats, `--format` selects another one"
                )
    return failures


def named_importer(name: str) -> Importer:
    """Return the importer `name`. Raises CommandError, which lists the known formats, if there is none."""
    from rankscope_ingest.importers import importers

    known = importers()
    if name not in known:
        hint = suggestion(name, known)
        raise CommandError(f"unknown format {name!r}; known formats: {', '.join(sorted(known))}.{hint}", code=USAGE)
    return known[name]


def _in_time_zone(importer: Importer, time_zone: str) -> Importer:
    from rankscope_contract.msprobe.csv_layout import check_time_zone
    from rankscope_ingest.importers.msprobe import Msprobe

    try:
        check_time_zone(time_zone)
    except ValueError as error:
        raise CommandError(f"--time-zone: {error}", code=USAGE) from error
    return Msprobe(time_zone) if isinstance(importer, Msprobe) else importer


def _logs(path: Path, chosen: Importer | None) -> Iterator[tuple[Path, Importer]]:
    """Yield each log with its importer.

    If `path` is a log (a file or a folder), it is the only log. Otherwise the logs are the files in the folder `path`.
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
        for other in others:
            print(f"not imported: {other}", file=sys.stderr)
        yield from found


@contextlib.contextmanager
def _progress(path: Path) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that shows a progress bar of the bytes read on a terminal, and does nothing elsewhere."""
    if not sys.stderr.isatty() or not path.is_file():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(path.name, total=path.stat().st_size)
        yield lambda done: bar.update(task, completed=done)


def _other(known: str, path: Path) -> str:
    return "its earlier import" if known == str(path.absolute()) else known


def _print_report(path: Path, report: ImportReport, shown: int | None, out: TextIO | None) -> None:
    steps = "" if report.last_step is None else f", up to step {report.last_step:,}"
    imported = f"{report.source_kind}, {report.records:,} records{steps}"
    details = [
        f"{report.attempts:,} attempts" if report.attempts > 1 else "",
        f"{report.anomalies:,} anomalies" if report.anomalies else "",
        f"{report.passed_over:,} lines without records" if report.passed_over else "",
        "replaces another log at this path" if report.is_replacement else "",
        "unchanged since the last import" if report.is_unchanged else "",
    ]
    more = f" ({', '.join(filter(None, details))})" if any(details) else ""
    if out is not None:
        print(f"{path}: {imported}; {report.rows_stored:,} new rows in {report.run}{more}", file=out)
    for note in report.notes:
        print(f"{path}: {note}", file=sys.stderr)
    if report.branches_from is not None:
        print(
            f"{path}: differs from {_other(report.branches_from, path)} from step {report.first_step} on; "
            f"its steps from there on are attempt {report.attempt} and supersede these steps of earlier imports",
            file=sys.stderr,
        )
    if report.imported_from is not None:
        print(
            f"{path}: ranks have reported data of {report.run}; the log is kept apart from it, with the label "
            f"imported_from={report.imported_from}",
            file=sys.stderr,
        )
    if report.left_out:
        print(
            f"{path}: {report.left_out:,} rows without labels, such as tensor statistics, are left out; "
            "to store them, import the log as another run with --run",
            file=sys.stderr,
        )
    if report.is_unchanged and report.malformed:
        print(f"{path}: {report.malformed:,} malformed lines at the last import", file=sys.stderr)
    elif report.malformed:
        lines = "; ".join(f"line {fault.line:,}: {fault.text}" for fault in report.faults[:shown])
        print(f"{path}: {report.malformed:,} malformed lines ({lines})", file=sys.stderr)
