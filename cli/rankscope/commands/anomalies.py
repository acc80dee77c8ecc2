"""`rankscope anomalies`: what the rules saw, the first cause first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.base.open_store import chosen_run, opened
from rankscope.base.options import Run, Store, step_range
from rankscope.output.rows import Format, Output, OutputFormat, write_rows
from rankscope.output.summary_text import SHOWN, anomaly_table


def anomalies(
    run: Run = None,
    store: Store = Path("history"),
    top: Annotated[int, typer.Option(min=1, help="How many to show.")] = 8,
    steps: Annotated[str | None, typer.Option(help="Only these steps: first:last.", show_default=False)] = None,
    form: OutputFormat = Format.TABLE,
    output: Output = None,
) -> None:
    """Show the anomalies of a run in causal order: step, then where in the step a fault shows first.

    [bold]Examples[/bold]

    rankscope anomalies --top 8

    rankscope anomalies my-run --steps 100:200 --format csv
    """
    from rankscope_storage.asking import reports

    with opened(store) as connection:
        name = chosen_run(connection, run)
        found = reports.anomalies(connection, name, top=top, steps=step_range(steps))
    if not found and form is Format.TABLE and output is None:
        print(f"no anomalies in {name}")
        return
    write_rows(anomaly_table(found, SHOWN if form is Format.TABLE else None), form, output, limit=top)
