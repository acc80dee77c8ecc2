"""`rankscope import`: read logs of other tools into a store. A repeated import adds only new rows."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.base.errors import USAGE, CommandError, suggestion
from rankscope.base.options import Store
from rankscope.base.spools import processes, store_spools

if TYPE_CHECKING:
    from rankscope_contract.rules import AnomalyRule
    from rankscope_ingest.importers import Importer, ImportReport, Options

SHOWN_FAULTS = 3
AUTOMATIC = "auto"

Shard = Annotated[str, typer.Option(help="Shard of the store to write to; not the shard of a running service.")]
TimeZone = Annotated[str, typer.Option(help="msprobe: time zone of the folder names: UTC+8, Europe/Berlin or local.")]
Run = Annotated[str | None, typer.Option(help="Name of the run. Default: the name of each log.", show_default=False)]
Kind = Annotated[
    str, typer.Option("--kind", "--format", help="Format of the logs. Default: detected from the content.")
]
Rules = Annotated[
    Path | None,
    typer.Option(help='JSON file with anomaly rules, such as [{"rule_name": "AnomalyNan"}].', show_default=False),
]
NoDefaultRules = Annotated[
    bool, typer.Option("--no-default-rules", help="Apply no anomaly rules, or only those of --rules.")
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Print the detected format of each log and the reason; import nothing.")
]
Loss = Annotated[
    str | None,
    typer.Option(help="Name of the quantity in the logs that is the loss. Default: chosen.", show_default=False),
]
Year = Annotated[
    int | None,
    typer.Option(
        min=1970,
        max=9999,
        help="Year of the last time in the logs, if the times have no year. Default: derived.",
        show_default=False,
    ),
]
Pattern = Annotated[
    list[str] | None,
    typer.Option(
        metavar="REGEX",
        help="Regular expression for lines of a text log, with a group for each counter and quantity, such as "
        "(?P<step>[0-9]+) and (?P<loss>[0-9.]+). Implies --format textlog. Repeatable.",
        show_default=False,
    ),
]
Reimport = Annotated[
    bool, typer.Option("--reimport", help="Remove the rows of earlier imports of the logs, and import them again.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print the first 20 malformed lines of each log instead of 3.")
]


def import_(
    files: Annotated[list[Path], typer.Argument(help="Log files or folders to import.", metavar="PATH...")],
    store: Store = Path("history"),
    run: Run = None,
    kind: Kind = AUTOMATIC,
    rules: Rules = None,
    no_default_rules: NoDefaultRules = False,
    explain: Explain = False,
    loss: Loss = None,
    year: Year = None,
    pattern: Pattern = None,
    reimport: Reimport = False,
    verbose: Verbose = False,
    shard: Shard = "0/1",
    time_zone: TimeZone = "UTC+8",
) -> None:
    """Import logs of other tools, or records of ranks without a service. A repeated import stores only new rows.

    [bold]Examples[/bold]

    rankscope import metrics.jsonl --run old-run

    rankscope import logs/*.jsonl --store history

    rankscope import train.log.1 train.log --run pretraining

    rankscope import rankscope-records

    rankscope import outputs/ --explain
    """
    from rankscope_contract.spool.layout import spool_folders
    from rankscope_ingest.base.errors import IngestError
    from rankscope_ingest.importers import Options
    from rankscope_storage.base.errors import StoreError

    kind = "textlog" if pattern and kind == AUTOMATIC else kind
    chosen = None if kind == AUTOMATIC else _importer(kind)
    try:
        spools = [path for path in files if chosen is None and spool_folders(path)]
        # Detect all formats first: nothing is written if no path is a log.
        plan, failures = _plan([path for path in files if path not in spools], chosen, run, time_zone)
        if explain:
            _explain_all(files, spools, plan)
        else:
            for path in spools:
                _import_spools(path, store, shard)
            if plan:
                shown = None if verbose else SHOWN_FAULTS
                options = Options(loss=loss, year=year, pattern=tuple(pattern or ()))
                if reimport:
                    _forget(plan, store, options)
                chosen_rules = _rules(rules, with_default=not no_default_rules)
                failures += _import_logs(plan, store, shard, rules=chosen_rules, shown=shown, options=options)
    except (IngestError, StoreError) as error:
        raise CommandError(str(error)) from error
    if failures:
        raise CommandError("\nrankscope: ".join(failures))


@dataclass(frozen=True, slots=True)
class _Log:
    """A log to import: its file or folder, its importer and the name of its run."""

    path: Path
    importer: Importer
    run: str


def _explain_all(files: Sequence[Path], spools: Sequence[Path], plan: Sequence[_Log]) -> None:
    for path in spools:
        print(f"{path}: records that ranks wrote without a service")
    for log in plan:
        _explain(log.path, log.importer.name)
    for path in files:
        if path.is_file() and path not in spools and all(log.path != path for log in plan):
            _explain(path, "unknown format")


def _plan(
    paths: Sequence[Path], chosen: Importer | None, run: str | None, time_zone: str
) -> tuple[list[_Log], list[str]]:
    """Return the logs at `paths`, and a message for each path that is no readable log.

    A log that has later steps than the checkpoints next to it is imported as a separate run, because the log repeats
    the steps of the checkpoints.
    """
    from rankscope_ingest.base.errors import IngestError
    from rankscope_ingest.importers import newer_log, run_name

    plan: list[_Log] = []
    failures = []
    for path in paths:
        try:
            plan += [
                _Log(log, _in_time_zone(importer, time_zone), run or run_name(log))
                for log, importer in _logs(path, chosen)
            ]
            newer = newer_log(path) if path.is_dir() and plan[-1].importer.name == "trainer_state" else None
            if newer is not None:
                plan.append(_Log(newer, _importer("jsonl"), f"{plan[-1].run}-{newer.stem}"))
                print(f"{newer} has later steps than {path}: imported as the run {plan[-1].run}", file=sys.stderr)
        except IngestError as error:
            failures.append(str(error))
    return plan, failures


def _import_spools(folder: Path, store: Path, shard: str) -> None:
    spools, rows = store_spools(folder, store, shard=shard, with_running=False)
    records = sum(spool.records for spool in spools)
    runs = ", ".join(sorted({spool.run for spool in spools})) or "no run"
    print(f"{folder}: {processes(len(spools))}, {records:,} records; {rows:,} new rows in {runs}")


def _import_logs(
    plan: Sequence[_Log],
    store: Path,
    shard: str,
    *,
    rules: Sequence[AnomalyRule],
    shown: int | None,
    options: Options,
) -> list[str]:
    """Import the logs in `plan`, and return a message for each that cannot be read or contains no record."""
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
            _print_report(log.path, report, shown)
            if not report.records:
                failures.append(
                    f"{log.path} contains no record in the format {report.source_kind}: `rankscope import {log.path} "
                    "--explain` prints the detected formats, `--format` selects another one"
                )
    return failures


def _forget(plan: Sequence[_Log], store: Path, options: Options) -> None:
    """Remove the rows of earlier imports of the logs in `plan`, so that they can be imported again.

    Raises IngestError, before any row is removed, if one of the logs cannot be imported again.
    """
    from rankscope_ingest.importers import is_live, known_imports, replaceable, stored_scalars
    from rankscope_storage.base.fsync import sync_to_disk
    from rankscope_storage.connection import connect
    from rankscope_storage.runs.edit import remove_source

    if not store.is_dir():
        raise CommandError(f"{store} is no store: there is nothing to import again, omit --reimport")
    with connect(store) as connection:
        found = [
            replaceable(
                log.path,
                log.run,
                log.importer,
                known_imports(connection, log.run),
                stored_scalars(connection, log.run),
                is_live=is_live(connection, log.run),
                options=options,
            )
            for log in plan
        ]
    for log, rows in zip(plan, found, strict=True):
        remove_source(store, log.run, sync_to_disk, rows.incarnations, kind=rows.kind, attempts=rows.attempts)


def _importer(name: str) -> Importer:
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


def _rules(path: Path | None, *, with_default: bool) -> Sequence[AnomalyRule]:
    """Return the anomaly rules in a JSON file, or without a file the default rules; none without `with_default`."""
    from rankscope_contract.rules import rule_from_config
    from rankscope_ingest.importers import IMPORT_RULES

    if path is None:
        return IMPORT_RULES if with_default else ()
    try:
        entries: Any = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries):
            return [rule_from_config(entry) for entry in entries]
    except (OSError, ValueError, RecursionError) as error:
        raise CommandError(f"{path}: {error}", code=USAGE) from error
    raise CommandError(f'{path}: expected a list such as [{{"rule_name": "AnomalyNan"}}]', code=USAGE)


def _explain(path: Path, chosen: str) -> None:
    from rankscope_ingest.importers import detections

    print(f"{path}: {chosen}")
    for importer, detection in detections(path):
        print(f"  {detection.confidence:4.0%}  {importer.name}: {detection.because}")


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


def _print_report(path: Path, report: ImportReport, shown: int | None) -> None:
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
    print(f"{path}: {imported}; {report.rows_stored:,} new rows in {report.run}{more}")
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
