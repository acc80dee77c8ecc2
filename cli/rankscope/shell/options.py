"""Options that several commands share, each with one spelling and one help text, and the parsers of their values."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rankscope.shell.errors import USAGE, CommandError

if TYPE_CHECKING:
    from rankscope_storage.base.location import Location
else:  # typer evaluates annotations of options and supports no union
    Location = Path

STANDARD_OUTPUT: Final = Path("-")
"""Value of an option for an output file: standard output."""


def named_folder(text: str) -> Path:
    """Return the folder that an option names. Raises CommandError for `-`, because a folder cannot be a stream."""
    path = Path(text)
    if path == STANDARD_OUTPUT:
        raise CommandError("- is standard output, which cannot be a folder: name a folder", code=USAGE)
    return path


@contextlib.contextmanager
def output_file(path: Path, suffix: str = "") -> Iterator[Path]:
    """Yield `path`; for `-`, a temporary file with the `suffix`, which is written to standard output at the end.

    Raises CommandError if the file cannot be written, or if standard output is a terminal and the file is binary.
    BrokenPipeError is not converted: it means that the reader of the pipe exited.
    """
    is_stream = path == STANDARD_OUTPUT
    try:
        with tempfile.TemporaryDirectory(prefix="rankscope-") as temporary:
            file = Path(temporary, f"output{suffix}") if is_stream else path
            yield file
            if is_stream:
                _copy_to_standard_output(file)
    except BrokenPipeError:
        raise
    except OSError as error:
        name = "standard output" if is_stream else path
        raise CommandError(f"cannot write {name}: {error.strerror or error}") from error


def _copy_to_standard_output(file: Path) -> None:
    with file.open("rb") as content:
        if sys.stdout.isatty():
            if b"\0" in content.read(4096):
                raise CommandError("the output is binary: write it to a file with --output, or to a pipe", code=USAGE)
            sys.stdout.write(file.read_text(encoding="utf-8", errors="replace"))  # which masks escape sequences
            return
        sys.stdout.flush()
        shutil.copyfileobj(content, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def store_folder(text: str) -> Location:
    """Return the folder or the location in a bucket that the option --store names.

    Raises CommandError for a URL that is no location of a store.
    """
    from rankscope_storage.base.errors import NotAStoreError
    from rankscope_storage.base.location import is_url, located

    try:
        return located(text) if is_url(text) else named_folder(text)
    except NotAStoreError as error:
        raise CommandError(str(error), code=USAGE) from error


def _found_store(context: typer.Context, store: Location) -> Location:
    """Return `store`; if no one named it and it is no store, the folder in which a training here wrote its records.

    An argument that is a file or folder names what to read, too.
    """
    from rankscope_contract.wire.spool import DEFAULT_SPOOL_DIR, spool_folders
    from rankscope_storage.api.store import is_store

    source = context.get_parameter_source("store")
    if source is None or source.name != "DEFAULT":
        return store
    records = Path(os.environ.get("RANKSCOPE_SPOOL_DIR") or DEFAULT_SPOOL_DIR)
    given = [context.params.get(str(one.name)) for one in context.command.params if one.param_type_name == "argument"]
    paths = (str(path) for one in given for path in (one if isinstance(one, list | tuple) else [one]))
    if any(map(os.path.exists, paths)) or is_store(store) or not spool_folders(records):
        return store
    print(f"{store} is no store: showing the records in {records}", file=sys.stderr)
    return records


_STORE: Final = {"parser": store_folder, "metavar": "FOLDER"}
_NAMES: Final = ("--store", "-s")

Store = Annotated[
    Location,
    typer.Option(
        *_NAMES,
        envvar="RANKSCOPE_STORE",
        help="Folder of the store, s3://bucket/prefix, or folder of records of ranks. "
        "Without a store, rankscope-records is used.",
        callback=_found_store,
        **_STORE,
    ),
]
_HELP: Final = "Folder of the store, or s3://bucket/prefix."
WrittenStore = Annotated[Location, typer.Option(*_NAMES, envvar="RANKSCOPE_STORE", help=_HELP, **_STORE)]
OptionalStore = Annotated[Location | None, typer.Option(*_NAMES, help=_HELP, **_STORE)]
Notify = Annotated[
    list[str] | None,
    typer.Option(
        "--notify",
        envvar="RANKSCOPE_NOTIFY",
        metavar="ADDRESS",
        help="Address to notify: any Apprise URL, https://… for a webhook, slack+https://… for Slack, or "
        "smtp://host:port?to=… for mail; may be repeated. The prefix critical= selects critical messages.",
    ),
]
Listen = Annotated[
    str | None, typer.Option(help="Listen address of the service, host:port; port 0 selects a free port.")
]
Run = Annotated[str | None, typer.Argument(help="Name of the run. Default: the latest run.", show_default=False)]

_MAX_STEP: Final = (1 << 63) - 1
"""Largest step number that the store can hold (int64)."""


def step_range(steps: str | None) -> tuple[int, int] | None:
    """Return the first and last step of the text `first:last` or of a single step; None if `steps` is None.

    Raises CommandError if the text is not a range, or if the range is empty or exceeds int64.
    """
    if steps is None:
        return None
    first, colon, last = steps.partition(":")
    try:
        bounds = int(first), int(last if colon else first)
    except ValueError:
        bounds = 1, 0
    if bounds[0] > bounds[1] or max(map(abs, bounds)) > _MAX_STEP:
        raise CommandError(f"--steps {steps!r}: write first:last, such as 100:200, or one step", code=USAGE)
    return bounds
