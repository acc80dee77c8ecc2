"""`rankscope incidents`: list the incidents of a run, close them, and silence their messages."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
import typer

from rankscope.access.stores import RunSelection, open_run, store_errors
from rankscope.output.rows import Format, Output, OutputFormat, printable, write_rows
from rankscope.shell.errors import USAGE, CommandError
from rankscope.shell.options import STANDARD_OUTPUT, Store
from rankscope_contract.wire.spool import spool_folders
from rankscope_storage.base.errors import NotAStoreError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.runs.silences import Silence, active_silences, silence
from rankscope_storage.runs.tags import close_incidents
from rankscope_view.data.incidents import Incident, closing_columns, sentence_of, utc
from rankscope_view.data.incidents import incidents as read

if TYPE_CHECKING:
    from rankscope_storage.base.location import Location

CLOSE, SILENCE = "close", "silence"
_SHOWN = ("n", "state", "severity", "attempt", "step", "opened", "incident", "closed")
_FURTHER = ("key", "rule", "rank", "kind", "tensor", "op", "value", "baseline", "threshold", "last_step", "events")


def incidents(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|LOG] | close RUN [N] | silence RUN",
            help="RUN or LOG: the run or log whose incidents are listed, by default the latest run. close RUN: close "
            "its open incidents, or only number N of the list. silence RUN: send no messages about incidents of the "
            "run, or of all runs with a name such as 'my-*'.",
            show_default=False,
        ),
    ] = None,
    store: Store = Path("history"),
    note: Annotated[str, typer.Option("--note", help="close, silence: a text that is stored with it.")] = "",
    rule: Annotated[
        str, typer.Option("--rule", help="silence: only incidents of this rule, or of all rules such as 'Gpu*'.")
    ] = "*",
    hours: Annotated[
        float, typer.Option("--hours", min=0, max=8760, help="silence: its length; 0 ends the silence now.")
    ] = 2.0,
    form: OutputFormat = "table",
    output: Output = STANDARD_OUTPUT,
) -> None:
    """List the incidents of a run or log, open ones first; close open incidents; or silence their messages.

    An incident is open until its cause is seen to be gone, or until a person closes it. close stores the user, the
    time and the note, also while a service writes the run. silence stores patterns of runs and rules, which all
    services of the store follow until its end. The incidents are stored as always.

    [bold]Examples[/bold]

    rankscope incidents my-run

    rankscope incidents train.log

    rankscope incidents close my-run 2 --note "bad batch, skipped"

    rankscope incidents silence 'my-*' --rule GpuThrottled --hours 8
    """
    given = words or []
    if given[:1] == [SILENCE] and len(given) == 2:
        _silence(store, given[1], rule, hours, note)
    elif given[:1] != [CLOSE] or len(given) == 1:
        if len(given) > 1:
            raise CommandError(
                "write: rankscope incidents RUN, rankscope incidents close RUN [N], or rankscope incidents silence RUN",
                code=USAGE,
            )
        _list(store, given[0] if given else None, form, output)
    elif len(given) > 3 or not all(number.isdecimal() for number in given[2:]):
        raise CommandError("write: rankscope incidents close RUN [N]; N is a number of the list", code=USAGE)
    else:
        _close(store, given[1], int(given[2]) if given[2:] else None, note)


def _silence(store: Location, run: str, rule: str, hours: float, note: str) -> None:
    with store_errors():
        made = silence(store.absolute(), run, rule, seconds=hours * 3600, note=note, sync=sync_to_disk)
    print(f"silenced: {_described(made)}" if hours else f"no longer silenced: {printable(f'{rule} in {run}')}")


def _described(one: Silence) -> str:
    note = f" “{one.note}”" if one.note else ""
    return printable(f"{one.rule} in {one.run} until {utc(one.until):%Y-%m-%d %H:%M} UTC, by {one.user}{note}")


def _found(selection: RunSelection) -> tuple[str, Sequence[Incident]]:
    with open_run(selection) as chosen:
        return chosen.run, read(chosen.connection, [chosen.run]).get(chosen.run, [])


def _list(store: Location, source: str | None, form: Format, output: Path) -> None:
    selection = RunSelection(source=source, store=store)
    name, found = _found(selection)
    is_table = form == "table"
    if is_table and output == STANDARD_OUTPUT and selection.path() is None:
        with contextlib.suppress(NotAStoreError):  # records of ranks have no silences
            for one in filter(lambda one: one.covers_run(name), active_silences(store)):
                print(f"silenced: {_described(one)}")
    if not found and is_table and output == STANDARD_OUTPUT:
        print(f"no incident in {name}")
        return
    write_rows(_table(found, _SHOWN if is_table else (*_SHOWN, *_FURTHER)), form, output)
    if is_table and output == STANDARD_OUTPUT and any(one.is_open for one in found) and selection.path() is None:
        print(f"close one with: rankscope incidents close {shlex.quote(name)} N --store {shlex.quote(str(store))}")


def _table(found: Sequence[Incident], columns: Sequence[str]) -> pa.Table:
    rows: list[dict[str, Any]] = [
        {
            **{name: getattr(one, name) for name in (*_FURTHER, "severity", "attempt", "step")},
            "n": one.number,
            "state": "open" if one.is_open else one.states[-1][1],
            "opened": "" if (at := utc(one.opened_at)) is None else f"{at:%Y-%m-%d %H:%M:%S}",
            "incident": printable(sentence_of(one)),
            "closed": one.closed_by,
        }
        for one in found
    ]
    return pa.Table.from_pylist([{name: row[name] for name in columns} for row in rows])


def _close(store: Location, run: str, number: int | None, note: str) -> None:
    if isinstance(store, Path) and spool_folders(store):
        raise CommandError(f"{store} has records of ranks: store them with `rankscope import {store}`, then close")
    name, found = _found(RunSelection(run=run, store=store))
    chosen = [one for one in found if (one.is_open if number is None else one.number == number)]
    if not chosen and number is not None:
        raise CommandError(f"{name} has no incident {number}: its incidents are 1 to {len(found)}", code=USAGE)
    closed = [one for one in chosen if one.is_open]
    if not closed:
        print(f"{name} has no open incident" if number is None else f"incident {number} of {name} is not open")
        return
    with store_errors():
        close_incidents(store.absolute(), [closing_columns(one) for one in closed], note, sync_to_disk)
    for one in closed:
        print(f"closed: {one.number}  {printable(sentence_of(one))}")
