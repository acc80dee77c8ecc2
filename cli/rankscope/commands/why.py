"""`rankscope why`: name the causes of the faults of a run, with their numbers and the next action."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rankscope.access.stores import RunOption, RunOrPath, RunSelection, open_run
from rankscope.output.rows import as_json, printable
from rankscope.rules.causes import FAULT, HEALTHY, UNKNOWN, diagnose
from rankscope.shell.options import Store

_EXIT_CODES: Final = {HEALTHY: 0, FAULT: 1, UNKNOWN: 3}


def why(
    source: RunOrPath = None,
    store: Store = Path("history"),
    run: RunOption = None,
    top: Annotated[int, typer.Option(min=1, help="Largest number of causes to print.")] = 8,
    as_json_text: Annotated[bool, typer.Option("--json", help="Print JSON, with all causes.")] = False,
) -> None:
    """Name the causes of the faults of a run or log, the first one first, and the checks that did not run.

    A cause is one rule that fires in steps that follow each other, or the failure or stall of the run. It has the rank
    and the tensor, unless several ranks fire at the same step; a statement that shows the numbers; and the next action.
    Causes are in the order of steps. At one step, exact rules come before statistical ones. Exit codes: 0 for a healthy
    run, 1 for a fault, 2 for an unknown run, and 3 if nothing was measured. A cause of severity info is no fault. In
    SQL, the causes are the view first_causes.

    [bold]Examples[/bold]

    rankscope why my-run

    rankscope why my-run --json

    rankscope why train.log
    """
    selection = RunSelection(source=source, store=store, run=run)
    with open_run(selection) as opened:
        found = diagnose(opened.connection, opened.run)
    if as_json_text:
        print(as_json(found), end="")
    else:
        print("\n".join(_lines(found, top, None if selection.path() else str(store))))
    raise typer.Exit(_EXIT_CODES[found["verdict"]])


def _lines(found: dict[str, Any], top: int, store: str | None) -> Iterator[str]:
    count = len(found["causes"])
    yield f"{printable(found['run'])}: {found['verdict']}, {count} cause{'' if count == 1 else 's'}"
    for cause in found["causes"][:top]:
        yield f"\n{cause['cause']}. {', '.join(_head(cause))}"
        yield f"   {printable(cause['message'] or cause['rule'])}"
        yield f"   evidence: {printable(cause['evidence'])}"
        yield f"   next: {cause['next']}"
    if count > top:
        yield f"\n{count - top} more causes: --top {count}"
    if found["causes"] and store is not None:
        yield f'\nA statement shows the numbers: rankscope sql --store {shlex.quote(store)} "…"'
    if found["not_run"]:
        yield "\nnot checked:"
        yield from (f"- {printable(one)}" for one in found["not_run"])


def _head(cause: dict[str, Any]) -> Iterator[str]:
    step, last = cause["step"], cause["last_step"]
    yield f"{cause['rule']} ({cause['severity']})"
    if step is not None:
        yield f"step {step}" if last in (None, step) else f"steps {step} to {last}"
    yield "rank unknown" if cause["rank"] is None else f"rank {cause['rank']}"
    if cause["tensor"] is not None:
        yield printable(f"{cause['kind']} of {cause['tensor']}")
