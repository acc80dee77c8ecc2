"""Changing the rows of one run wherever they lie, in one commit.

All files that can hold the run are written anew, or left out; the commit puts the new ones in their place under the
mutex of compaction, so that readers see all of it or nothing. What dies before it leaves only files that no version
names. Appends of other runs go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.channel import NOTHING
from rankscope_contract.records import DATASETS
from rankscope_storage.care.compaction import MUTEX
from rankscope_storage.durable import Sync
from rankscope_storage.errors import ConflictError, StoreError
from rankscope_storage.files.layout import SHARED_PREFIX, file_mantissa_bits
from rankscope_storage.files.parquet import DataFile, discard, open_file, write_file
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.schema import conform
from rankscope_storage.writing.watermarks import watermark_transaction

_ATTEMPTS: Final = 5
"""A commit may be refused so often in a row."""
_ROUNDS: Final = 50

RowChange = Callable[[pa.Table], pa.Table | None]
"""Returns some rows of the run as they shall be, None when they go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """What becomes of the rows of `run`: `rows` says it of the version of the store that the commit builds on.

    It raises StoreError where that cannot be done.
    """

    run: str
    rows: Callable[[int], RowChange]
    part: str | None = None  # of files that hold no other run
    forgets: bool = False  # positions of its processes too, so that the same rows may be stored again


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteReport:
    """How many rows changed, and files; `bytes_freed` on the disk once maintenance has been."""

    rows: int = 0
    files_removed: int = 0
    files_added: int = 0
    bytes_freed: int = 0

    def __add__(self, other: RewriteReport) -> RewriteReport:
        """Return what both did."""
        return RewriteReport(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


def carry_out(root: Path, rewrite: Rewrite, sync: Sync) -> RewriteReport:
    """Commit `rewrite`; a compaction that comes between is let by. Raises ConflictError when it never ends.

    Rows of the run that a service appended meanwhile, from the rings of its last ranks, are changed as well.
    """
    log = Log.open(root, sync)
    change: RowChange | None = None
    done = RewriteReport()
    refused = 0
    for _ in range(_ROUNDS):
        try:
            report, change = _attempt(log, rewrite, change, sync)
        except ConflictError:
            refused += 1
            if refused == _ATTEMPTS and not done.rows:
                raise
            if refused == _ATTEMPTS:
                break
        else:
            refused = 0
            done += report
            if not report.files_removed:
                return done
        log.refresh()
    raise StoreError(
        f"{done.rows} rows of {rewrite.run!r} were changed; a service goes on appending others, which keep the name. "
        "Stop it, and do the same with them: `rankscope runs rm` again, or `rankscope runs merge` to where they belong"
    )


def _attempt(log: Log, rewrite: Rewrite, change: RowChange | None, sync: Sync) -> tuple[RewriteReport, RowChange]:
    """Return what was done and how; what comes later must be changed in the same way."""
    # From here on the handle must not be refreshed: only so does the mutex cover what is looked at.
    mutex = (log.transaction(MUTEX) or 0) + 1
    changed = rewrite.rows(log.version) if change is None else change
    work = _Work(log.root, rewrite, changed, sync)
    snapshot = log.snapshot()
    try:
        for dataset in DATASETS:
            for file in snapshot.of(dataset, run=rewrite.run).to_pylist():
                work.take(file)
        if work.removed:
            forgotten = {watermark_transaction(name): NOTHING for name in work.incarnations if rewrite.forgets}
            log.commit(Change(added=work.added, removed=work.removed, transactions={MUTEX: mutex, **forgotten}))
    except ConflictError:
        discard(log.root, work.added)
        raise
    except (OSError, pa.ArrowException) as error:
        discard(log.root, work.added)
        raise StoreError(f"cannot rewrite files of {log.root}: {error}") from error
    return work.report(), changed


class _Work:
    """The files of one rewrite, as they come."""

    def __init__(self, root: Path, rewrite: Rewrite, change: RowChange, sync: Sync) -> None:
        self._root = root
        self._rewrite = rewrite
        self._change = change
        self._sync = sync
        self._rows = 0
        self.removed: list[DataFile] = []
        self.added: list[DataFile] = []
        self.incarnations: set[str] = set()

    def take(self, file: dict[str, Any]) -> None:
        """Replace `file`, a row of a Snapshot's files, unless it holds no row of the run after all."""
        content = open_file(self._root / file["path"], file["dataset"], plain=("run",))
        table = conform(content.read(), file["dataset"])
        is_own = pc.equal(table.column("run"), self._rewrite.run)
        own, others = table.filter(is_own), table.filter(pc.invert(is_own))
        if not own.num_rows:
            return
        self._rows += own.num_rows
        self.incarnations.update(value for value in own.column("incarnation").unique().to_pylist() if value is not None)
        names = ("path", "dataset", "part", "rows", "size_bytes")
        self.removed.append(DataFile(**{name: file[name] for name in names}, modified_at_ms=0, statistics=""))
        changed = self._change(own)
        rest = [rows for rows in (changed, others) if rows is not None and rows.num_rows]
        if rest:
            moves = not others.num_rows and not file["part"].startswith(SHARED_PREFIX) and file["dataset"] != "samples"
            part = self._rewrite.part if moves and self._rewrite.part else file["part"]
            rows = conform(pa.concat_tables(rest, promote_options="default"), file["dataset"])
            bits = file_mantissa_bits(file["path"])
            self.added.append(write_file(self._root, file["dataset"], part, rows, self._sync, mantissa_bits=bits))

    def report(self) -> RewriteReport:
        """Return what was done."""
        freed = _bytes(self.removed) - _bytes(self.added)
        return RewriteReport(
            rows=self._rows, files_removed=len(self.removed), files_added=len(self.added), bytes_freed=freed
        )


def _bytes(files: Sequence[DataFile]) -> int:
    return sum(file.size_bytes for file in files)
