"""`rankscope runs`: what the store holds."""

from __future__ import annotations

from pathlib import Path

from rankscope.opening import opened
from rankscope.options import Output, OutputFormat, Store
from rankscope.output import Format, write_rows


def runs(store: Store = Path("history"), form: OutputFormat = Format.TABLE, output: Output = None) -> None:
    """List the runs of a store, the latest first.

    [bold]Example[/bold]: rankscope runs --store history --format json
    """
    from rankscope_storage import reports

    with opened(store) as connection:
        rows = reports.runs(connection)
    write_rows(rows, form, output, limit=rows.num_rows)
