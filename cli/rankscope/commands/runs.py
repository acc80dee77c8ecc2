"""`rankscope runs`: what the store holds, and what becomes of a run."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.errors import USAGE, CommandError
from rankscope.opening import chosen_run, opened
from rankscope.options import Output, OutputFormat, Store
from rankscope.output import Format, write_rows

if TYPE_CHECKING:
    from rankscope_storage.care.rewriting import RewriteReport


class Action(enum.StrEnum):
    """What to do with runs."""

    LIST = "list"
    RM = "rm"
    RENAME = "rename"
    MERGE = "merge"


_NAMES = {Action.LIST: "", Action.RM: "RUN", Action.RENAME: "RUN NAME", Action.MERGE: "RUN INTO"}


def runs(
    action: Annotated[Action, typer.Argument(help="list, rm, rename or merge.")] = Action.LIST,
    names: Annotated[list[str] | None, typer.Argument(help="rm: RUN; rename: RUN NAME; merge: RUN INTO.")] = None,
    store: Store = Path("history"),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="rm: do not ask.")] = False,
    form: OutputFormat = Format.TABLE,
    output: Output = None,
) -> None:
    """List the runs of a store, the latest first; remove one, rename one, or join one to another.

    merge puts the attempts of RUN behind those of INTO. What rm has removed is gone; a log may be imported again.
    All three refuse while a service writes the run.

    [bold]Examples[/bold]

    rankscope runs --store history --format json

    rankscope runs rm trial-3 --yes

    rankscope runs rename 48151623 pretraining

    rankscope runs merge 48151624 pretraining
    """
    if action is Action.LIST and not names:
        _list(store, form, output)
        return
    given = names or []
    if len(given) != len(_NAMES[action].split()):
        raise CommandError(f"write: rankscope runs {action} {_NAMES[action]}".rstrip(), code=USAGE)
    with opened(store) as connection:
        run = chosen_run(connection, given[0])
    if action is Action.RM and not yes and not typer.confirm(f"Remove all rows of {run!r} from {store}?"):
        raise typer.Exit(1)
    report = _change(action, store.absolute(), run, given[-1])
    freed = f"; {report.bytes_freed:,} bytes will be free after maintenance" if action is Action.RM else ""
    print(f"{report.rows:,} rows in {report.files_removed} files{freed}")


def _list(store: Path, form: Format, output: Path | None) -> None:
    from rankscope_storage import reports

    with opened(store) as connection:
        rows = reports.runs(connection)
    write_rows(rows, form, output, limit=rows.num_rows)


def _change(action: Action, root: Path, run: str, other: str) -> RewriteReport:
    from rankscope_storage.care import runs as care
    from rankscope_storage.durable import sync_to_disk
    from rankscope_storage.errors import StoreError

    try:
        if action is Action.RM:
            return care.remove(root, run, sync_to_disk)
        change = care.rename if action is Action.RENAME else care.merge
        return change(root, run, other, sync_to_disk)
    except StoreError as error:
        raise CommandError(str(error)) from error
