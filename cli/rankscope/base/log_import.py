"""Find logs of other tools, import them into a store, and print the results, for the commands that accept logs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from rankscope.base.errors import USAGE, CommandError, suggestion
from rankscope.base.log_results import ImportResults, ProgressOf, print_some, progress_of

if TYPE_CHECKING:
    from rankscope_contract.rules import AnomalyRule
    from rankscope_ingest.importers import Importer, LogGroup, Options

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
    the steps of the checkpoints. Raises CommandError if no run can have the name `run`.
    """
    from rankscope_contract.model.identity import check_run_name
    from rankscope_ingest.base.errors import IngestError
    from rankscope_ingest.importers import newer_log, run_name

    try:
        check_run_name(run or "")
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
    store: Path,
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
    from rankscope_storage.base.errors import StoreError
    from rankscope_storage.connection import connect

    owner = f"import, process {os.getpid()} on {socket.gethostname()}"
    results = ImportResults(len(plan), shown, out)
    with (
        StoreFolder.open(store, create=True).claim(shard, owner=owner) as writer,
        connect(store) as connection,
        progress_of([log.path for log in plan], is_brief=results.is_brief) as progress,
    ):
        group = LogGroup(writer, connection, on_stored=results.print_stored)
        try:
            for number, log in enumerate(plan):
                if number % GROUP_LOGS == 0:
                    group.begin({each.run for each in plan[number : number + GROUP_LOGS]})
                _import_log(log, group, rules, options, results, progress)
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
    log: Log,
    group: LogGroup,
    rules: Sequence[AnomalyRule],
    options: Options,
    results: ImportResults,
    progress: ProgressOf,
) -> None:
    from rankscope_ingest.base.errors import IngestError
    from rankscope_ingest.importers import import_records

    try:
        with progress(log.path) as show:
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
    from rankscope_contract.msprobe.csv_layout import check_time_zone
    from rankscope_ingest.importers.msprobe import Msprobe

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
