"""`rankscope anomalies`: what the rules saw, the first cause first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pyarrow as pa
import typer

from rankscope.opening import chosen_run, opened
from rankscope.options import Output, OutputFormat, Run, Store
from rankscope.output import Format, write_rows
from rankscope.ranges import step_range

if TYPE_CHECKING:
    from rankscope_storage.asking.reports import AnomalyRow

SHOWN = ("step", "rank", "rule", "kind", "tensor", "op", "value", "baseline", "threshold")
"""What a table has room for; the other formats give every column."""


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


def anomaly_table(found: Sequence[AnomalyRow], columns: Sequence[str] | None = None) -> pa.Table:
    """Return the anomalies as rows, with `columns` or all of them."""
    from rankscope_storage.schema import dataset_schema

    schema = dataset_schema("events")
    names = columns or tuple(asdict(found[0]) if found else schema.names)
    rows = [asdict(row) for row in found]
    return pa.table(
        [pa.array([row[name] for row in rows], schema.field(name).type) for name in names], names=list(names)
    )
