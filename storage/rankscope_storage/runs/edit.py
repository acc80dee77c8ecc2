"""Removing, renaming and merging runs: the rows of one run change in one commit. Never while a service writes the run.

All files that can hold the run are written again or removed, and one commit replaces them under the mutex of the log:
readers see all of it or nothing. A crash before the commit leaves only files that no version names. Appends of other
runs continue meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.events import RunState
from rankscope_contract.model.schema import DATASETS
from rankscope_contract.protocol.channel import NOTHING
from rankscope_storage.base.errors import ConflictError, ShardLockError, StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.schema import conform
from rankscope_storage.connection import connect
from rankscope_storage.files.parquet import DataFile, discard, open_file, write_file
from rankscope_storage.files.partitioning import SHARED_PREFIX, file_mantissa_bits, own_part
from rankscope_storage.log.delta import Log
from rankscope_storage.log.entries import watermark_transaction
from rankscope_storage.log.shard_lock import all_shards
from rankscope_storage.log.snapshot import FileFilter
from rankscope_storage.log.translation import Change

_RETRIES: Final = 5
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


def apply_rewrite(root: Path, rewrite: Rewrite, sync: Sync) -> RewriteReport:
    """Commit `rewrite`; a compaction that comes between is let by. Raises ConflictError when it never ends.

    Rows of the run that a service appended meanwhile, from the rings of its last ranks, are changed as well.
    """
    log = Log.open(root, sync)
    change: RowChange | None = None
    done = RewriteReport()
    refused = 0
    for _ in range(_ROUNDS):
        try:
            report, change = _try_rewrite(log, rewrite, change, sync)
        except ConflictError:
            refused += 1
            if refused == _RETRIES and not done.rows:
                raise
            if refused == _RETRIES:
                break
        else:
            refused = 0
            done += report
            if not report.files_removed:
                return done
    raise StoreError(
        f"{done.rows} rows of {rewrite.run!r} were changed; a service goes on appending others, which keep the name. "
        "Stop it, and do the same with them: `rankscope runs rm` again, or `rankscope runs merge` to where they belong"
    )


def _try_rewrite(log: Log, rewrite: Rewrite, change: RowChange | None, sync: Sync) -> tuple[RewriteReport, RowChange]:
    """Return what was done and how; what comes later must be changed in the same way."""
    work: _Work | None = None
    changed = change

    def build() -> Change | None:
        nonlocal work, changed
        changed = rewrite.rows(log.version) if changed is None else changed
        work = _Work(log.root, rewrite, changed, sync)
        try:
            for dataset in DATASETS:
                for file in log.snapshot().of(FileFilter(dataset, run=rewrite.run)).to_pylist():
                    work.take(file)
        except (OSError, pa.ArrowException) as error:
            discard(log.root, work.added)
            raise StoreError(f"cannot rewrite files of {log.root}: {error}") from error
        if not work.removed:
            return None
        forgotten = {watermark_transaction(name): NOTHING for name in work.incarnations if rewrite.forgets}
        return Change(added=work.added, removed=work.removed, transactions=forgotten)

    log.replace_files(build)
    assert work is not None
    assert changed is not None
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
        self.removed.append(DataFile.from_snapshot(file))
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


LONGEST_NAME: Final = 1000
"""As the service takes it of a rank."""

_LIVE: Final = (RunState.PENDING, RunState.RUNNING, RunState.STALLED)
_IMPORTED: Final = "SELECT source_kind FROM runs WHERE run = $run AND source_kind <> 'live'"


def remove(root: Path, run: str, sync: Sync) -> RewriteReport:
    """Remove all rows of `run`. What was imported may be imported again; what a rank still holds may not come back."""
    with _quiet(root, run):
        with connect(root) as connection:
            was_imported = connection.query(_IMPORTED, {"run": run}).num_rows > 0
        return apply_rewrite(root, Rewrite(run=run, rows=lambda _: lambda _: None, forgets=was_imported), sync)


def rename(root: Path, run: str, name: str, sync: Sync) -> RewriteReport:
    """Give `run` the name `name`, which no other run has."""
    if not name.strip():
        raise StoreError("a run needs a name: rows without one are those of exporters beside the ranks")
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise StoreError(f"a name of a run has at most {LONGEST_NAME} characters, all of them printable")

    def renamed(version: int) -> RowChange:
        if _last(root, version, name) is not None:
            raise StoreError(f"a run is called {name!r} already: `rankscope runs merge` joins two")
        return lambda rows: _named(rows, name)

    with _quiet(root, run):
        return apply_rewrite(root, Rewrite(run=run, rows=renamed, part=own_part(name)), sync)


def merge(root: Path, run: str, into: str, sync: Sync) -> RewriteReport:
    """Join `run` to `into`: its attempts come behind those that `into` has."""
    if run == into:
        raise StoreError(f"{run!r} cannot be joined to itself")

    def joined(version: int) -> RowChange:
        last = _last(root, version, into)
        if last is None:
            raise StoreError(f"no run is called {into!r}: `rankscope runs rename` gives {run!r} that name")
        return lambda rows: _named(_shifted(rows, last), into)

    with _quiet(root, run, into):
        return apply_rewrite(root, Rewrite(run=run, rows=joined, part=own_part(into)), sync)


@contextlib.contextmanager
def _quiet(root: Path, *runs: str) -> Iterator[None]:
    """Keep services from the store meanwhile if any of `runs` still goes on, as far as the store knows.

    Raises ShardLockError while one lives: what it appends would keep its old name.
    """
    with connect(root) as connection:
        states = connection.query("SELECT run, state FROM runs WHERE list_contains($runs, run)", {"runs": list(runs)})
    live = [row for row in states.to_pylist() if row["state"] in _LIVE]
    with contextlib.ExitStack() as held:
        try:
            if live:  # or its service is gone
                held.enter_context(all_shards(root, "rankscope runs"))
        except ShardLockError as error:
            raise ShardLockError(
                f"run {live[0]['run']!r} is {live[0]['state']}: wait until it has ended, or stop the service. {error}"
            ) from error
        yield


def _last(root: Path, version: int, run: str) -> dict[str, int] | None:
    """Return the highest attempt and ordinal of `run`, -1 where it has none; None when it has no row at all."""
    with connect(root, locked=True, version=version) as connection:
        sources = (connection.relation(name, run=run) for name in DATASETS)
        rows = " UNION ALL ".join(f"SELECT attempt, ordinal FROM {source} WHERE run = $run" for source in sources)
        highest = "coalesce(max(attempt), -1) AS attempt, coalesce(max(ordinal), -1) AS ordinal"
        found: list[dict[str, int]] = connection.query(
            f"SELECT {highest} FROM ({rows}) HAVING count(*) > 0", {"run": run}
        ).to_pylist()
    return found[0] if found else None


def _named(rows: pa.Table, name: str) -> pa.Table:
    texts = pa.array([name] * rows.num_rows, pa.string())
    return rows.set_column(rows.schema.get_field_index("run"), "run", texts)


def _shifted(rows: pa.Table, last: Mapping[str, int]) -> pa.Table:
    """Return `rows` with the columns of `last` counted on from there."""
    for column, value in last.items():
        position = rows.schema.get_field_index(column)
        moved = pc.add(rows.column(column), pa.scalar(value + 1, rows.schema.field(column).type))
        rows = rows.set_column(position, column, moved)
    return rows
