"""`rankscope anomalies`: list the anomalies of a run or log in causal order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.access.stores import RunOption, RunOrPath, RunSelection, open_run
from rankscope.output.rows import Output, OutputFormat, write_rows
from rankscope.output.run_texts import anomaly_table, line_table
from rankscope.shell.options import STANDARD_OUTPUT, Store, step_range

if TYPE_CHECKING:
    from rankscope_storage.api.summaries import AnomalyLine


def anomalies(
    source: RunOrPath = None,
    store: Store = Path("history"),
    run: RunOption = None,
    top: Annotated[int, typer.Option(min=1, help="Largest number of anomalies to show.")] = 8,
    steps: Annotated[str | None, typer.Option(help="Only these steps: first:last.", show_default=False)] = None,
    form: OutputFormat = "table",
    output: Output = STANDARD_OUTPUT,
) -> None:
    """Show the first anomalies of a run or log: by step, then by the stage of the step in which they appear.

    A table has one line for each cause: a rule that fires for one tensor and statistic in consecutive steps. It has the
    range of steps, the ranks, the first values and the number of firings. The other formats have a row for each firing.

    [bold]Examples[/bold]

    rankscope anomalies --top 8

    rankscope anomalies my-run --steps 100:200 --format csv

    rankscope anomalies train.log
    """
    from rankscope_storage.api import summaries

    bounds = step_range(steps)
    with open_run(RunSelection(source=source, store=store, run=run)) as chosen:
        if form != "table":
            found = summaries.anomalies(chosen.connection, chosen.run, top=top, steps=bounds)
            write_rows(anomaly_table(found), form, output)
            return
        lines = summaries.anomaly_lines(chosen.connection, chosen.run, steps=bounds)
    if lines or output != STANDARD_OUTPUT:
        write_rows(line_table(lines[:top]), form, output, limit=top)
    if output == STANDARD_OUTPUT:
        print(_total(lines, top, chosen.run))


def _total(lines: Sequence[AnomalyLine], top: int, run: str) -> str:
    if not lines:
        return f"no anomalies in {run}"
    more = f"; --top {len(lines)} shows all lines" if len(lines) > top else ""
    count = sum(line.firings for line in lines)
    return f"{min(top, len(lines)):,} of {len(lines):,} lines, {count:,} anomalies in {run}{more}"
