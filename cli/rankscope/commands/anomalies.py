"""`rankscope anomalies`: list the anomalies of a run or log in causal order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.base.options import STANDARD_OUTPUT, Store, step_range
from rankscope.base.sources import Choice, RunOption, Source, open_run
from rankscope.output.rows import Format, Output, OutputFormat, write_rows
from rankscope.output.summary_text import SHOWN, anomaly_table


def anomalies(
    source: Source = None,
    store: Store = Path("history"),
    run: RunOption = None,
    top: Annotated[int, typer.Option(min=1, help="Largest number of anomalies to show.")] = 8,
    steps: Annotated[str | None, typer.Option(help="Only these steps: first:last.", show_default=False)] = None,
    form: OutputFormat = Format.TABLE,
    output: Output = STANDARD_OUTPUT,
) -> None:
    """Show the first anomalies of a run or log: by step, then by the stage of the step in which they appear.

    The last line has the number of all anomalies.

    [bold]Examples[/bold]

    rankscope anomalies --top 8

    rankscope anomalies my-run --steps 100:200 --format csv

    rankscope anomalies train.log
    """
    from rankscope_storage.api import summaries

    bounds = step_range(steps)
    with open_run(Choice(source=source, store=store, run=run)) as chosen:
        found = summaries.anomalies(chosen.connection, chosen.run, top=top, steps=bounds)
        count = summaries.count_anomalies(chosen.connection, chosen.run, steps=bounds)
    if not found and form is Format.TABLE and output == STANDARD_OUTPUT:
        print(f"no anomalies in {chosen.run}")
        return
    write_rows(anomaly_table(found, SHOWN if form is Format.TABLE else None), form, output, limit=top)
    if form is Format.TABLE and output == STANDARD_OUTPUT:
        more = f"; --top {count} shows all" if count > top else ""
        print(f"{len(found):,} of {count:,} anomalies in {chosen.run}{more}")
