"""`rankscope import`: read logs of other tools into a store. A repeated import adds only new rows."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.access.log_import import SHOWN_FAULTS, TIME_ZONE, Log, import_logs, named_importer, plan_logs
from rankscope.access.stores import processes, store_spools
from rankscope.rules.rule_files import read_rules
from rankscope.shell.errors import CommandError, command_errors
from rankscope.shell.options import WrittenStore

if TYPE_CHECKING:
    from rankscope_contract.rules import AnomalyRule
    from rankscope_ingest.importers import Options
    from rankscope_storage.base.location import Location

AUTOMATIC = "auto"

Shard = Annotated[str, typer.Option(help="Shard of the store to write to; not the shard of a running service.")]
TimeZone = Annotated[str, typer.Option(help="msprobe: time zone of the folder names: UTC+8, Europe/Berlin or local.")]
Run = Annotated[str | None, typer.Option(help="Name of the run. Default: the name of each log.", show_default=False)]
Kind = Annotated[
    str, typer.Option("--kind", "--format", help="Format of the logs. Default: detected from the content.")
]
Rules = Annotated[
    Path | None,
    typer.Option(help='TOML or JSON file with rules, such as [{"rule_name": "AnomalyNan"}].', show_default=False),
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
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Print the result of each of more than 20 logs; the first 20 malformed lines of each log instead of 3.",
    ),
]


def import_(
    files: Annotated[list[Path], typer.Argument(help="Log files or folders to import.", metavar="PATH...")],
    store: WrittenStore = Path("history"),
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
    time_zone: TimeZone = TIME_ZONE,
) -> None:
    """Import logs of other tools, or records of ranks without a service. A repeated import stores only new rows.

    [bold]Examples[/bold]

    rankscope import metrics.jsonl --run old-run

    rankscope import logs/*.jsonl --store history

    rankscope import train.log.1 train.log --run pretraining

    rankscope import rankscope-records

    rankscope import outputs/ --explain
    """
    from rankscope_contract.wire.spool import spool_folders
    from rankscope_ingest.base.errors import IngestError
    from rankscope_ingest.importers import Options
    from rankscope_storage.base.errors import StoreError

    kind = "textlog" if pattern and kind == AUTOMATIC else kind
    chosen = None if kind == AUTOMATIC else named_importer(kind)
    with command_errors(IngestError, StoreError):
        spools = [path for path in files if chosen is None and spool_folders(path)]
        # Detect all formats first: nothing is written if no path is a log.
        plan, failures = plan_logs([path for path in files if path not in spools], chosen, run, time_zone)
        if explain:
            _explain_all(files, spools, plan)
        else:
            for path in spools:
                _import_spools(path, store, shard)
            if plan:
                shown = None if verbose else SHOWN_FAULTS
                options = Options(loss=loss, year=year, pattern=tuple(pattern or ()))
                if reimport:
                    plan = _forget(plan, store, options)
                chosen_rules = _rules(rules, with_default=not no_default_rules)
                failures += import_logs(
                    plan, store, shard, rules=chosen_rules, shown=shown, options=options, out=sys.stdout
                )
    if failures:
        raise CommandError("\nrankscope: ".join(failures))


def _explain_all(files: Sequence[Path], spools: Sequence[Path], plan: Sequence[Log]) -> None:
    for path in spools:
        print(f"{path}: records that ranks wrote without a service")
    for log in plan:
        _explain(log.path, log.importer.name)
    for path in files:
        if path.is_file() and path not in spools and all(log.path != path for log in plan):
            _explain(path, "unknown format")


def _import_spools(folder: Path, store: Location, shard: str) -> None:
    spools, rows = store_spools(folder, store, shard=shard, with_running=False)
    records = sum(spool.records for spool in spools)
    runs = ", ".join(sorted({spool.run for spool in spools})) or "no run"
    print(f"{folder}: {processes(len(spools))}, {records:,} records; {rows:,} new rows in {runs}")


def _forget(plan: Sequence[Log], store: Location, options: Options) -> list[Log]:
    """Remove the rows of earlier imports of the logs in `plan`, and return the logs to import again.

    Raises IngestError, before any row is removed, if one of the logs cannot be imported again.
    """
    from rankscope_ingest.importers import is_live, known_imports, replaceable, stored_scalars
    from rankscope_storage.api.store import is_store
    from rankscope_storage.base.fsync import sync_to_disk
    from rankscope_storage.connection import connect
    from rankscope_storage.runs.edit import remove_source

    if not is_store(store):
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
    return [dataclasses.replace(log, choices=rows.choices) for log, rows in zip(plan, found, strict=True)]


def _rules(path: Path | None, *, with_default: bool) -> Sequence[AnomalyRule]:
    """Return the anomaly rules in the file `path`, or without a file the default rules; none without `with_default`."""
    from rankscope_ingest.importers import IMPORT_RULES

    if path is None:
        return IMPORT_RULES if with_default else ()
    return read_rules(path, IMPORT_RULES)


def _explain(path: Path, chosen: str) -> None:
    from rankscope_ingest.importers import detections

    print(f"{path}: {chosen}")
    for importer, detection in detections(path):
        print(f"  {detection.confidence:4.0%}  {importer.name}: {detection.because}")
