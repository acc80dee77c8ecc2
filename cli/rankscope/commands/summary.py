"""`rankscope summary`: how one run went, on one screen."""

from __future__ import annotations

from pathlib import Path

from rankscope.base.open_store import chosen_run, opened
from rankscope.base.options import Run, Store
from rankscope.output.summary_text import summary_lines


def summary(run: Run = None, store: Store = Path("history")) -> None:
    """Say how a run went: state, steps, loss, speed, incidents, what is stored.

    [bold]Example[/bold]: rankscope summary my-run --store history
    """
    from rankscope_storage.asking import reports

    with opened(store) as connection:
        found = reports.summary(connection, chosen_run(connection, run))
    for line in summary_lines(found):
        print(line)
