"""What the demo prints at the end: how the run went, what went wrong in it, and how to ask for more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from rankscope.base.open_store import opened
from rankscope.demo.checks import Plan, Query, checks, delays
from rankscope.demo.receiver import Alert
from rankscope.output.rows import columns, print_table
from rankscope.output.summary_text import SHOWN, anomaly_table, summary_lines

STORE: Final = "history"

STATEMENTS: Final = (
    (
        "How the loss fell, averaged over the ranks:",
        """\
select step, avg(value) as loss
from scalars
where name = 'loss' and (step = 1 or step % 40 = 0)
group by step
order by step""",
    ),
    (
        "Where a NaN was first (with the fault: in a local gradient of one rank, before the ranks were averaged):",
        """\
select step, rank, kind, tensor, nans, numel
from tensor_stats
where nans > 0
order by step, kind desc, rank
limit 4""",
    ),
    (
        "Which gradients left their moving average the furthest:",
        """\
select step, rank, kind, tensor, norm, norm_baseline, norm / norm_baseline as times
from tensor_stats
where kind in ('grad_unreduced', 'grad_reduced') and norm_baseline > 0
order by times desc
limit 4""",
    ),
)


def report(console: Console, folder: Path, plan: Plan, alerts: Sequence[Alert]) -> bool:
    """Print the end of the demo; return whether everything was as it should be."""
    from rankscope_storage.asking import reports

    store = folder / STORE
    with opened(store) as connection:
        _heading(console, "Summary")
        for line in summary_lines(reports.summary(connection, plan.run)):
            console.print(line, markup=False, soft_wrap=True)
        _heading(console, "Anomalies, the first cause first")
        found = reports.anomalies(connection, plan.run, top=8)
        if found:
            print_table(anomaly_table(found, SHOWN))
        else:
            console.print("none")
        for question, statement in STATEMENTS:
            _heading(console, question)
            console.print(statement, markup=False, style="cyan", soft_wrap=True)
            console.print()
            print_table(connection.query(statement))

        def query(statement: str) -> list[tuple[Any, ...]]:
            return [tuple(row.values()) for row in connection.query(statement).to_pylist()]

        _tell_delays(console, plan, query, alerts)
        _heading(console, "Checks")
        outcome = list(checks(plan, query, alerts))
    for check in outcome:
        console.print(
            f"{'ok  ' if check.holds else 'FAIL'}  {check.text}", markup=False, style=None if check.holds else "red"
        )
    _heading(console, "What to try next")
    for line in _next_steps(folder, store):
        console.print(line, markup=False, soft_wrap=True)
    return all(check.holds for check in outcome)


def _tell_delays(console: Console, plan: Plan, query: Query, alerts: Sequence[Alert]) -> None:
    found = [
        (str(fault.step), fault.rule, way, f"{seconds:.1f} s") for fault, way, seconds in delays(plan, query, alerts)
    ]
    if found:
        _heading(console, "From the bad step to the receiver, by each way")
        for line in columns(("step", "rule", "told by", "after"), found):
            console.print(line, markup=False, soft_wrap=True)


def _next_steps(folder: Path, store: Path) -> Sequence[str]:
    return (
        f"The data lies in {store.resolve()} (Parquet files and a Delta log); logs and configuration beside it.",
        "",
        f"  rankscope runs --store {store}",
        f"  rankscope anomalies --store {store} --steps 120",
        f"  rankscope serve {folder / 'service.toml'}      # and in another shell, with the address it prints:",
        "  RANKSCOPE_INGEST_URL=http://… torchrun --standalone --nproc-per-node 2 examples/gpt_ddp.py --no-faults",
        "",
        "The command is .venv/bin/rankscope. README.md has the three lines for your own script,",
        "docs/sql-cookbook.md has more questions.",
    )


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(text, style="bold", markup=False, soft_wrap=True)
