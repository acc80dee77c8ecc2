"""Open a store for a command and select the run. Errors of the store and of DuckDB become one-line messages.

A command that only reads also accepts a folder with the records that ranks wrote to disk without a service.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.base.errors import USAGE, CommandError, suggestion
from rankscope.base.spools import readable_store

if TYPE_CHECKING:
    from rankscope_storage.connection import Connection


@contextlib.contextmanager
def open_store(store: Path, *, locked: bool = True) -> Iterator[Connection]:
    """Yield a connection to `store`, which is a store or a folder with spools of ranks.

    StoreError and duckdb.Error are raised as CommandError with the same text.
    """
    import duckdb

    from rankscope_storage.base.errors import StoreError
    from rankscope_storage.connection import connect

    try:
        with readable_store(store) as folder, connect(folder, locked=locked) as connection:
            yield connection
    except StoreError as error:
        raise CommandError(_one_line(str(error))) from error
    except duckdb.Error as error:
        raise CommandError(_one_line(str(error))) from error


def resolve_run(connection: Connection, run: str | None) -> str:
    """Return `run` if the store contains it; if `run` is None, return the run that started last.

    Raises CommandError if the store has no such run; the message suggests the run with the most similar name.
    """
    rows = connection.query("select run from runs order by started_at desc nulls last, ordinal desc")
    known: list[str] = rows["run"].to_pylist()
    if run is None:
        if not known:
            raise CommandError(f"{connection.path} contains no run yet")
        return known[0]
    if run not in known:
        hint = suggestion(run, known) or f" Runs in the store: {', '.join(sorted(known)[:10]) or 'none yet'}."
        raise CommandError(f"run {run!r} not found.{hint}", code=USAGE)
    return run


def _one_line(text: str) -> str:
    """Return the text of an error as one line, without the copy of the statement that DuckDB appends to it."""
    message = text.partition("\n\nLINE")[0]
    return " ".join(part.strip() for part in message.splitlines() if part.strip())
