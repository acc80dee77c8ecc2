"""Opening a store for a command, and naming what is wrong in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.base.errors import USAGE, CommandError, nearest

if TYPE_CHECKING:
    from rankscope_storage.connection import Connection


@contextlib.contextmanager
def opened(store: Path, *, locked: bool = True) -> Iterator[Connection]:
    """Give a connection to `store`; what the store or DuckDB refuses ends the command with their own words."""
    import duckdb

    from rankscope_storage.connection import connect
    from rankscope_storage.errors import StoreError

    try:
        with connect(store, locked=locked) as connection:
            yield connection
    except StoreError as error:
        raise CommandError(_one_line(str(error))) from error
    except duckdb.Error as error:
        raise CommandError(_one_line(str(error))) from error


def chosen_run(connection: Connection, run: str | None) -> str:
    """Return `run` if the store has it, or the one that began last; else end the command naming the nearest."""
    rows = connection.query("select run from runs order by started_at desc nulls last, ordinal desc")
    known: list[str] = rows["run"].to_pylist()
    if run is None:
        if not known:
            raise CommandError(f"{connection.path} holds no run yet")
        return known[0]
    if run not in known:
        hint = nearest(run, known) or f" The store has {', '.join(sorted(known)[:10]) or 'none yet'}."
        raise CommandError(f"no run is called {run!r}.{hint}", code=USAGE)
    return run


def _one_line(text: str) -> str:
    """Return a message as one line; of DuckDB's, what follows is a copy of the statement."""
    message = text.partition("\n\nLINE")[0]
    return " ".join(part.strip() for part in message.splitlines() if part.strip())
