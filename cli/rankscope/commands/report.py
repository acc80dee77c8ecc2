"""`rankscope report`: write the report of one run as a single HTML file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rankscope.access.stores import RunSelection, open_run, with_selection
from rankscope.shell.errors import USAGE, CommandError
from rankscope.shell.options import STANDARD_OUTPUT

Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="File to write; - is standard output. Default: the name of the run with .html."
    ),
]
Summary = Annotated[bool, typer.Option("--summary", help="Print the summary of the run, too.")]


@with_selection
def report(
    selection: RunSelection,
    output: Output = None,
    summary: Summary = False,
) -> None:
    """Write the report of a run as one HTML file: summary, curves, incidents, events and configuration.

    The file works offline and can be sent by mail. Its curves can be zoomed. The source is a run of the store, another
    store, a log of any format of `rankscope import`, or the address of a service, which makes the report itself.

    [bold]Examples[/bold]

    rankscope report my-run --store history

    rankscope report train.log --output train.html

    rankscope report http://127.0.0.1:9470 --run my-run
    """
    from rankscope.output.report_file import fetch_report, make_report

    source, run = selection.source, selection.run
    if source is not None and source.startswith(("http://", "https://")):
        if run is None:
            raise CommandError("--run is missing: name the run whose report the service makes", code=USAGE)
        made, name = fetch_report(source, run), run
    else:
        path = selection.path()
        named = selection if path is None else RunSelection(source=str(path), store=selection.store, run=run)
        with open_run(named) as chosen:
            made, name = make_report(chosen.connection, chosen.run, str(path or selection.store)), chosen.run
    written = made.write(output, name)
    facts = sys.stderr if written == STANDARD_OUTPUT else sys.stdout
    if summary:
        facts.write(made.summary)
    if written != STANDARD_OUTPUT:
        print(f"report of {name}: {written.absolute().as_uri()}")
