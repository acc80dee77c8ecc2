"""`rankscope anomalies`: list the anomalies of a run in causal order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.base.open_store import open_store, resolve_run
from rankscope.base.options import STANDARD_OUTPUT, Run, Store, step_range
from rankscope.output.rows import Format, Output, OutputFormat, write_rows
from rankscope.output.summary_text import SHOWN, anomaly_table


def anomalies(
    run: Run = None,
    store: Store = Path("history"),
    top: Annotated[int, typer.Option(min=1, help="Largest number of anomalies to show.")] = 8,
    steps: Annotated[str | None, typer.Option(help="Only these steps: first:last.", show_default=False)] = None,
    form: OutputFormat = Format.TABLE,
    output: Output = STANDARD_OUTPUT,
) -> None:
    """Show the anomalies of a run in causal order: by step, then by the stage of the step in which they appear.

    [bold]Examples[/bold]

    rankscope anomalies --top 8

    rankscope anomalies my-run --steps 100:200 --format csv
    """
    from rankscope_storage.api import summaries

    with open_store(store) as connection:
        name = resolve_run(connection, run)
        found = summaries.anomalies(connection, name, top=top, steps=step_range(steps))
    if not found and form is Format.TABLE and output == STANDARD_OUTPUT:
        print(f"no anomalies in {name}")
        return
    write_rows(anomaly_table(found, SHOWN if form is Format.TABLE else None), form, output, limit=top)
