"""Read the records that ranks wrote to disk without a service (`spool_dir`), for the commands that accept them."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.base.errors import CommandError
from rankscope.base.progress_bar import progress_bar

if TYPE_CHECKING:
    from rankscope_ingest.service.offline import OfflineSpool


@contextlib.contextmanager
def readable_store(folder: Path) -> Iterator[Path]:
    """Yield `folder`, or if it contains spools, a temporary store with their records.

    Raises CommandError if the records cannot be read.
    """
    from rankscope_contract.wire.spool import spool_folders

    if not spool_folders(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="rankscope-") as temporary:
        store = Path(temporary) / "store"
        store_spools(folder, store, with_running=True)
        yield store


def processes(count: int) -> str:
    """Return a number of processes as text, such as "1 process" or "2 processes"."""
    return f"{count} process{'' if count == 1 else 'es'}"


def store_spools(
    folder: Path, store: Path, *, shard: str = "0/1", with_running: bool
) -> tuple[tuple[OfflineSpool, ...], int]:
    """Store the records of the spools in `folder`; return the stored spools, and the number of new rows.

    Spools of running processes are left out unless `with_running`. Standard error names the spools that are left out.
    Raises CommandError if the records cannot be read or stored.
    """
    from rankscope_ingest.base.errors import IngestError
    from rankscope_ingest.service.offline import import_spools, inspect
    from rankscope_storage.base.errors import StoreError

    found = inspect(folder)
    chosen = tuple(spool for spool in found.spools if with_running or not spool.is_running)
    for problem in found.unreadable:
        print(f"not read: {problem}", file=sys.stderr)
    if running := sum(spool.is_running for spool in found.spools):
        fate = "read up to now" if with_running else "not imported; import the folder again after they have ended"
        print(f"{folder}: {processes(running)} still running; the records are {fate}", file=sys.stderr)
    try:
        with progress_bar("processes", f"reading {folder}") as show:
            rows = import_spools(chosen, store, shard=shard, progress=lambda done: show(done, len(chosen)))
    except (IngestError, StoreError) as error:
        raise CommandError(str(error)) from error
    return chosen, rows
