"""`rankscope summary`: print the summary of one run."""

from __future__ import annotations

from pathlib import Path

from rankscope.base.open_store import open_store, resolve_run
from rankscope.base.options import Run, Store
from rankscope.output.summary_text import summary_lines


def summary(run: Run = None, store: Store = Path("history")) -> None:
    """Print state, steps, loss, speed, incidents and stored rows of a run.

    [bold]Example[/bold]: rankscope summary my-run --store history
    """
    from rankscope_storage.api import summaries

    with open_store(store) as connection:
        found = summaries.summary(connection, resolve_run(connection, run))
    for line in summary_lines(found):
        print(line)
