"""`rankscope events`: print the event log of a run: launches, steps, evaluations, checkpoints, incidents, exits."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rankscope.access.stores import RunSelection, open_run, with_selection
from rankscope.output.run_texts import FormatOption, events_text
from rankscope.shell.errors import USAGE, CommandError, suggestion
from rankscope_contract.model.events import Severity


@with_selection
def events(
    selection: RunSelection,
    type_: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            "-t",
            help="Only this group (step, evaluation, checkpoint, restart, incident, other) or type (launch, exit, "
            "anomaly, …); may be repeated.",
            show_default=False,
        ),
    ] = None,
    severity: Annotated[
        Severity, typer.Option(help="Only events of at least this severity: info, warning or critical.")
    ] = Severity.INFO,
    rank: Annotated[int | None, typer.Option(help="Only events of this rank.", show_default=False)] = None,
    newest: Annotated[int, typer.Option("--newest", "-n", min=1, help="Largest number of lines.")] = 200,
    form: FormatOption = "text",
) -> None:
    """Print the newest lines of the event log of a run, the newest first. --type step has a line for each logged step.

    [bold]Examples[/bold]

    rankscope events my-run --type checkpoint --type evaluation

    rankscope events --severity critical --format json

    rankscope events train.log --newest 1000
    """
    from rankscope_view.data.detail import EVENT_TYPES, EventQuery, read_detail, select_events
    from rankscope_view.data.events import EVENT_GROUPS

    for name in type_ or ():
        if name not in EVENT_TYPES:
            hint = suggestion(name, EVENT_TYPES) or f" Known: {', '.join(EVENT_TYPES)}."
            raise CommandError(f"--type {name!r} is no type of events.{hint}", code=USAGE)
    with open_run(selection) as chosen:
        detail = chosen.stored(read_detail(chosen.connection, chosen.run))
    # Lines of steps repeat the loss: as on a page, they are listed if they are chosen, and if their loss is NaN.
    has_steps = form == "json" or severity is not Severity.INFO
    query = EventQuery(
        types=tuple(type_ or (() if has_steps else EVENT_GROUPS)), severity=severity, rank=rank, newest=newest
    )
    sys.stdout.write(events_text(chosen.run, select_events(detail, query), form))
