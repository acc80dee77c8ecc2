"""Print the final report of the demo: summary, anomalies, SQL examples, checks and next steps.

At its end, the demo shows the page of its run: in a browser of the desktop, or as an address.
"""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from rankscope.access.stores import open_store
from rankscope.demo.checks import ExpectedRun, checks
from rankscope.demo.receiver import Alert
from rankscope.output.report_file import make_report
from rankscope.output.rows import print_table
from rankscope.output.run_texts import line_table, summary_text

if TYPE_CHECKING:
    from rankscope_storage.base.location import Location


def has_desktop(environment: Mapping[str, str], platform: str) -> bool:
    """Return whether a browser with a window can be opened for the user of this terminal."""
    if environment.get("SSH_CONNECTION") or environment.get("CI"):
        return False
    return platform == "darwin" or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))


def show_page(
    console: Console,
    page: Path,
    store: Location,
    *,
    environment: Mapping[str, str] = os.environ,
    platform: str = sys.platform,
    open_browser: Callable[[str], bool] = webbrowser.open,
) -> None:
    """Print the address of `page` and the command that shows all pages, and open the page on a desktop."""
    address = page.absolute().as_uri()
    console.print(f"Page of the run:  {address}", markup=False, soft_wrap=True)
    console.print(f"All pages:        rankscope view {store}", markup=False, soft_wrap=True)
    if console.is_terminal and has_desktop(environment, platform):
        open_browser(address)


STORE: Final = "history"
PAGE: Final = "report.html"

STATEMENTS: Final = (
    (
        "Loss, averaged over the ranks:",
        """\
select step, avg(value) as loss
from scalars
where name = 'loss' and (step = 1 or step % 40 = 0)
group by step
order by step nulls last""",
    ),
    (
        "First NaN (the injected fault: a local gradient of one rank, before the all-reduce):",
        """\
select step, rank, kind, tensor, nans, numel
from tensor_stats
where nans > 0
order by step nulls last, kind desc, rank nulls last, tensor
limit 4""",
    ),
    (
        "Gradients with the largest deviation from their moving average:",
        """\
select step, rank, kind, tensor, norm, norm_baseline, norm::double / nullif(norm_baseline, 0) as times
from tensor_stats
where kind in ('grad_unreduced', 'grad_reduced') and norm_baseline > 0
order by times desc nulls last, step nulls last, rank nulls last, tensor
limit 4""",
    ),
)


NEXT_STEPS: Final = """\
Data: {data} (Parquet files and a Delta log). Logs and configuration: the same parent folder.

  rankscope runs --store {store}
  rankscope anomalies --store {store} --steps 120
  rankscope serve {folder}/service.toml      # then, in another shell, with the printed address:
  RANKSCOPE_INGEST_URL=http://… torchrun --standalone --nproc-per-node 2 examples/gpt_ddp.py --no-faults

The command is .venv/bin/rankscope. README.md shows the three lines for your own script;
docs/sql-cookbook.md contains more queries.
"""


def report(console: Console, folder: Path, expected: ExpectedRun, alerts: Sequence[Alert]) -> bool:
    """Print the report of the demo; return whether all checks passed."""
    from rankscope_storage.api import summaries
    from rankscope_view.data.summary import read_summary

    store = folder / STORE
    with open_store(store) as connection:
        _heading(console, "Summary")
        known = read_summary(connection, expected.run)
        if known is not None:
            console.print(summary_text(known, "text"), markup=False, soft_wrap=True, end="")
        _heading(console, "Anomalies in causal order")
        if found := summaries.anomaly_lines(connection, expected.run)[:8]:
            print_table(line_table(found))
        else:
            console.print("none")
        for question, statement in STATEMENTS:
            _heading(console, question)
            console.print(statement, markup=False, style="cyan", soft_wrap=True)
            console.print()
            print_table(connection.query(statement))

        def query(statement: str) -> list[tuple[Any, ...]]:
            return [tuple(row.values()) for row in connection.query(statement).to_pylist()]

        _heading(console, "Checks")
        outcome = list(checks(expected, query, alerts))
        page = make_report(connection, expected.run, str(store)).write(folder / PAGE, expected.run)
    for check in outcome:
        console.print(
            f"{'ok  ' if check.holds else 'FAIL'}  {check.text}", markup=False, style=None if check.holds else "red"
        )
    _heading(console, "Next steps")
    console.print(NEXT_STEPS.format(store=store, data=store.resolve(), folder=folder), markup=False, soft_wrap=True)
    show_page(console, page, store)
    return all(check.holds for check in outcome)


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(text, style="bold", markup=False, soft_wrap=True)
