"""`rankscope import`: logs of other tools into a store, as often as one likes."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.errors import USAGE, CommandError, nearest
from rankscope.options import Store

if TYPE_CHECKING:
    from rankscope_ingest.importers import Importer, ImportReport

SHOWN_FAULTS = 3


def import_(
    files: Annotated[list[Path], typer.Argument(help="Logs to bring in.")],
    store: Store = Path("history"),
    run: Annotated[
        str | None, typer.Option(help="Name of the run; each file's own name when left out.", show_default=False)
    ] = None,
    form: Annotated[
        str | None, typer.Option("--format", help="Format of the files; found out when left out.", show_default=False)
    ] = None,
    shard: Annotated[str, typer.Option(help="Shard to write as; another one while a service writes 0/1.")] = "0/1",
) -> None:
    """Bring logs of other tools into a store. Repeating it for a log that has grown stores only what is new.

    [bold]Examples[/bold]

    rankscope import metrics.jsonl --run old-run

    rankscope import logs/*.jsonl --store history
    """
    from rankscope_ingest.errors import IngestError
    from rankscope_ingest.importers import find_importer, import_records
    from rankscope_storage.errors import StoreError
    from rankscope_storage.store import Store as StoreFolder

    chosen = None if form is None else _importer(form)
    owner = f"import, process {os.getpid()} on {socket.gethostname()}"
    try:
        # What no importer understands is said before anything is written.
        plan = [(path, chosen or find_importer(path)) for path in files]
        with StoreFolder.open(store, create=True).claim(shard, owner=owner) as writer:
            for path, importer in plan:
                _tell(path, import_records(path, writer, importer, run=run or path.stem))
    except (IngestError, StoreError) as error:
        raise CommandError(str(error)) from error


def _importer(name: str) -> Importer:
    from rankscope_ingest.importers import importers

    known = importers()
    if name not in known:
        hint = nearest(name, known)
        raise CommandError(f"no format is called {name!r}; known are {', '.join(sorted(known))}.{hint}", code=USAGE)
    return known[name]


def _tell(path: Path, report: ImportReport) -> None:
    steps = "" if report.last_step is None else f", up to step {report.last_step:,}"
    brought = f"{report.source_kind}, {report.records:,} records{steps}"
    print(f"{path}: {brought}; {report.rows_stored:,} new rows in {report.run}")
    if report.malformed:
        lines = "; ".join(f"line {fault.line}: {fault.text}" for fault in report.faults[:SHOWN_FAULTS])
        print(f"{path}: {report.malformed:,} lines could not be read ({lines})", file=sys.stderr)
