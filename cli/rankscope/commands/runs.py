"""`rankscope runs`: list, show, tag, remove, rename and merge the runs of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import pyarrow as pa
import typer

from rankscope.access.stores import open_store, resolve_run, store_errors
from rankscope.output.rows import Format, Output, OutputFormat, as_json, write_rows, write_text
from rankscope.output.run_texts import run_detail_lines, run_details, run_lines, terminal_width
from rankscope.shell.errors import USAGE, CommandError
from rankscope.shell.options import STANDARD_OUTPUT, Store
from rankscope_storage.api import summaries
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.runs import edit, tags
from rankscope_storage.runs.tags import TagsEdit, parse_tags
from rankscope_view.data.incidents import incidents
from rankscope_view.data.runs import end_sentence, open_sentence

if TYPE_CHECKING:
    from rankscope_storage.base.location import Location

Action = Literal["list", "show", "tag", "untag", "note", "rm", "rename", "merge"]
_NAMES: Final[Mapping[Action, str]] = {
    "list": "",
    "show": "RUN",
    "tag": "RUN KEY=VALUE…",
    "untag": "RUN KEY…",
    "note": "RUN TEXT",
    "rm": "RUN",
    "rename": "RUN NAME",
    "merge": "RUN INTO",
}
Names = Annotated[
    list[str] | None,
    typer.Argument(
        help="show, rm: RUN; tag: RUN KEY=VALUE…; untag: RUN KEY…; note: RUN TEXT; rename: RUN NAME; merge: RUN INTO."
    ),
]
_LABELS: Final = ("tag", "untag", "note")


def runs(
    action: Annotated[Action, typer.Argument(help="list, show, tag, untag, note, rm, rename or merge.")] = "list",
    names: Names = None,
    store: Store = Path("history"),
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", "-t", help="list: only runs with this tag, KEY=VALUE or KEY; may be repeated."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="rm: do not ask for confirmation.")] = False,
    form: OutputFormat = "table",
    output: Output = STANDARD_OUTPUT,
) -> None:
    """List the runs of a store, the latest first; or show, tag, remove, rename or merge runs.

    A list of runs as a table has the columns that fit into the terminal; the other output formats have every column.

    show prints state, tags, note, commit, command and configuration of a run, with secrets masked. Tags and notes can
    be changed while a service writes the run; an empty note removes the note.

    merge appends the attempts of RUN to those of INTO. rm is permanent, but a log can be imported again. rm, rename
    and merge fail while a service writes the run.

    [bold]Examples[/bold]

    rankscope runs --store history --tag team=ours --format json

    rankscope runs show 48151623

    rankscope runs tag 48151623 team=ours size=7b

    rankscope runs note 48151623 "warm-up too short"

    rankscope runs rm trial-3 --yes

    rankscope runs rename 48151623 pretraining

    rankscope runs merge 48151624 pretraining
    """
    given = names or []
    if tag and action != "list":
        usage = f"rankscope runs {action} {_NAMES[action]}"
        raise CommandError(f"--tag filters the list of runs: write {usage}", code=USAGE)
    if not _fits(action, len(given)):
        raise CommandError(f"write: rankscope runs {action} {_NAMES[action]}".rstrip(), code=USAGE)
    if action == "list":
        _list(store, tag or (), form, output)
        return
    with open_store(store) as connection:
        run = resolve_run(connection, given[0])
    if action == "show":
        _show(store, run, form, output)
    elif action in _LABELS:
        _relabel(store.absolute(), run, _wanted(action, given[1:]))
    elif action != "rm" or yes or typer.confirm(f"Remove all rows of {run!r} from {store}?"):
        _rewrite(action, store.absolute(), run, given[-1])
    else:
        raise typer.Exit(1)


def _fits(action: Action, count: int) -> bool:
    wanted = len(_NAMES[action].split())
    return count >= wanted if _NAMES[action].endswith("…") else count == wanted


def _list(store: Location, tags: Sequence[str], form: Format, output: Path) -> None:
    with open_store(store) as connection:
        rows, damaged = connection.undamaged(lambda: summaries.runs(connection))
        listed, more = connection.undamaged(lambda: incidents(connection, rows["run"].to_pylist()))
    open_ = [[one for one in listed.get(run, ()) if one.is_open] for run in rows["run"].to_pylist()]
    name, sentence = ("sentence", open_sentence) if form == "table" else ("end", end_sentence)
    sentences = map(sentence, rows["state"].to_pylist(), open_)
    rows = rows.append_column("open_incidents", pa.array(map(len, open_), pa.int64()))
    rows = rows.append_column(name, pa.array(sentences, pa.string()))
    if tags:
        rows = _having(rows, tags)
    if form == "table":
        width = terminal_width() if output == STANDARD_OUTPUT else None
        write_text("".join(f"{line}\n" for line in run_lines(rows, width)), output)
    else:
        write_rows(rows, form, output)
    if damaged or more:
        raise CommandError("\nrankscope: ".join((*damaged, *more)))


def _having(rows: pa.Table, wanted: Sequence[str]) -> pa.Table:
    """Return the runs that have all tags in `wanted`.

    A tag is written as KEY=VALUE, or as KEY if any value is accepted.
    """
    pairs = [text.partition("=") for text in wanted]

    def fits(tags: dict[str, str]) -> bool:
        return all(key in tags and (not equals or tags[key] == value) for key, equals, value in pairs)

    return rows.filter([fits(parse_tags(text)) for text in rows["tags"].to_pylist()])


def _show(store: Location, run: str, form: Format, output: Path) -> None:
    if form not in ("table", "json"):
        raise CommandError("runs show prints text, or JSON with --format json", code=USAGE)
    with open_store(store) as connection:
        facts = run_details(connection, run)
    write_text(as_json(facts) if form == "json" else "".join(f"{line}\n" for line in run_detail_lines(facts)), output)


def _wanted(action: Action, given: Sequence[str]) -> TagsEdit:
    if action == "note":
        return tags.set_note(given[0])
    if action == "untag":
        return tags.remove_tags(given)
    pairs = [text.partition("=") for text in given]
    for text, (_, equals, _) in zip(given, pairs, strict=True):
        if not equals:
            raise CommandError(f"{text!r} is not a tag: write KEY=VALUE", code=USAGE)
    return tags.set_tags({key: value for key, _, value in pairs})


def _relabel(root: Location, run: str, change: TagsEdit) -> None:
    with store_errors():
        labels = tags.edit_tags(root, run, change, sync_to_disk)
    print(f"tags  {'  '.join(f'{key}={value}' for key, value in labels.tags.items()) or 'none'}")
    print(f"note  {labels.note or 'none'}")


def _rewrite(action: Action, root: Location, run: str, other: str) -> None:
    with store_errors():
        if action == "rm":
            report = edit.remove(root, run, sync_to_disk)
        else:
            report = {"rename": edit.rename, "merge": edit.merge}[action](root, run, other, sync_to_disk)
    freed = f"; {report.bytes_freed:,} bytes will be freed by maintenance" if action == "rm" else ""
    print(f"{report.rows:,} rows in {report.files_removed} files{freed}")
