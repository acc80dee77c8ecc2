"""Open a store for a command and select the run. Errors of the store and of DuckDB become one-line messages.

A command that only reads also accepts a folder with the records that ranks wrote to disk without a service.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rankscope.base.errors import USAGE, CommandError, suggestion
from rankscope.base.spools import readable_store

if TYPE_CHECKING:
    from rankscope_storage.connection import Connection


SHOWN_RUNS: Final = 10

_FULL: Final = (
    "The disk is full: delete files outside of the store, or move the store to a larger disk. Then run the command "
    "again. The removal of a run needs space, too: it deletes the old files two hours later"
)


@contextlib.contextmanager
def open_store(store: Path, *, locked: bool = True) -> Iterator[Connection]:
    """Yield a connection to `store`, which is a store or a folder with spools of ranks.

    See `store_errors` for its errors.
    """
    from rankscope_storage.connection import connect

    with store_errors(), readable_store(store) as folder, connect(folder, locked=locked) as connection:
        yield connection


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Raise CommandError for each error of a store, with the exit code USAGE if there is no store."""
    import duckdb
    import pyarrow as pa

    from rankscope_storage.base.errors import NotAStoreError, StoreError, damage

    try:
        yield
    except NotAStoreError as error:
        raise CommandError(str(error), code=USAGE) from error
    except (StoreError, duckdb.Error, pa.ArrowInvalid) as error:
        text = damage(error) or _one_line(str(error))
        raise CommandError(f"{text}. {_FULL}" if re.search("No space left|quota exceeded", text) else text) from error


def resolve_run(connection: Connection, run: str | None) -> str:
    """Return `run` if the store contains it; if `run` is None, return the run that started last.

    Raises CommandError if the store has no such run; the message suggests the run with the most similar name.
    """
    query = "select run from runs order by started_at desc nulls last, ordinal desc"
    rows, damaged = connection.undamaged(lambda: connection.query(query))
    known: list[str] = rows["run"].to_pylist()
    if damaged and run not in known:
        raise CommandError("\nrankscope: ".join(damaged))
    if run is None:
        if not known:
            raise CommandError(f"{connection.path} contains no run yet")
        return known[0]
    if run not in known:
        more = f", and {len(known) - SHOWN_RUNS:,} more: see rankscope runs" if len(known) > SHOWN_RUNS else ""
        hint = (
            suggestion(run, known)
            or f" Runs in the store: {', '.join(sorted(known)[:SHOWN_RUNS]) or 'none yet'}{more}."
        )
        raise CommandError(f"run {run!r} not found.{hint}", code=USAGE)
    return run


def _one_line(text: str) -> str:
    """Return the text of an error as one line, without the copy of the statement that DuckDB appends to it."""
    message = text.partition("\n\nLINE")[0]
    return " ".join(part.strip() for part in message.splitlines() if part.strip())
