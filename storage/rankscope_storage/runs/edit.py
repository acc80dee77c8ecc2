"""Remove, rename and join runs: all rows of a run change in one commit, while no service writes the run.

All files that can contain the run are rewritten or removed, and one commit replaces them. This commit conflicts with
all other rewrites. Readers see either all or none of the change. A process that is killed before the commit leaves only
files that no version contains. Services continue to append rows of other runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.events import RunState
from rankscope_contract.model.redaction import redacted_name
from rankscope_contract.wire.channel import NOTHING
from rankscope_storage.base.datasets import DATASETS
from rankscope_storage.base.errors import ConflictError, ShardLockError, StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.location import Location
from rankscope_storage.base.schema import conform
from rankscope_storage.connection import connect
from rankscope_storage.files.encoding import DataFile, discard, read_file, write_file
from rankscope_storage.files.sorting import SHARED_PREFIX, file_mantissa_bits, own_part
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.log.entries import watermark_transaction
from rankscope_storage.log.shard_lock import all_shards
from rankscope_storage.log.snapshot import RowRanges

_RETRIES: Final = 5
"""Number of refused commits after which an edit of a run fails."""
_ROUNDS: Final = 50

RowChange = Callable[[pa.Table], pa.Table | None]
"""Function that gets some rows of an edited run, and returns the rows that replace them, or None to remove them.

It returns the same object if no row changes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """A change of the rows of `run`.

    `rows` is a function that gets the number of a version of the store. It returns the function that changes rows, or
    raises StoreError. `part` is the new part (partition) of files that contain only this run. With `forgets`, the
    watermarks of processes of which rows are removed are reset, so that the same rows can be stored again.
    """

    run: str
    rows: Callable[[int], RowChange]
    part: str | None = None
    forgets: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteReport:
    """Report of an edit of a run: numbers of changed rows and files.

    `bytes_freed` is the disk space that vacuum will free.
    """

    rows: int = 0
    files_removed: int = 0
    files_added: int = 0
    bytes_freed: int = 0


def apply_rewrite(root: Location, rewrite: Rewrite, sync: Sync) -> RewriteReport:
    """Commit `rewrite`, a change of the rows of a run, and retry if a compaction commits first.

    Raises ConflictError after several refusals. Meanwhile, a service may append rows of the run, from records that the
    ranks of the run still hold. These rows are changed too, in the same way.
    """
    log = Log.open(root, sync)
    rows = changed_rows = 0
    first: RowChange | None = None
    change: RowChange | None = None
    removed: list[DataFile] = []
    added: list[DataFile] = []

    def build() -> Change | None:
        nonlocal change, changed_rows
        change = first or rewrite.rows(log.version)
        built, changed_rows = _change_of_files(log, rewrite, change, sync)
        return built

    for _ in range(_ROUNDS):
        try:
            committed = log.replace_files(build, tries=_RETRIES)
        except ConflictError:
            if not rows:
                raise
            break
        if committed is None:
            freed = sum(file.size_bytes for file in removed) - sum(file.size_bytes for file in added)
            return RewriteReport(rows=rows, files_removed=len(removed), files_added=len(added), bytes_freed=freed)
        first = change
        rows += changed_rows
        removed += committed.removed
        added += committed.added
    raise StoreError(
        f"{rows} rows of run {rewrite.run!r} were changed, but a service continues to append rows with this name. "
        "Stop it, then run `rankscope runs rm` again, or `rankscope runs merge` to join the new rows"
    )


def _change_of_files(log: Log, rewrite: Rewrite, change: RowChange, sync: Sync) -> tuple[Change | None, int]:
    """Write the files with rows that `change` changes; return the change of the store and the number of these rows."""
    removed: list[DataFile] = []
    added: list[DataFile] = []
    rows, incarnations = 0, set[str]()
    try:
        for dataset in DATASETS:
            for file in log.snapshot().of(dataset, RowRanges.of(rewrite.run)).to_pylist():
                own, others = _divided(log.root, file, rewrite.run)
                kept = change(own)
                if own.num_rows and kept is not own:
                    rows += own.num_rows
                    incarnations |= _processes(own) - _processes(kept)
                    removed.append(DataFile.from_snapshot(file))
                    added.extend(_rewritten(log.root, file, rewrite, sync, changed=kept, others=others))
    except (OSError, pa.ArrowException) as error:
        discard(log.root, added)
        raise StoreError(f"cannot rewrite files of {log.root}: {error}") from error
    forgotten = {watermark_transaction(name): NOTHING for name in incarnations if rewrite.forgets}
    return Change(added=added, removed=removed, transactions=forgotten) if removed else None, rows


def _processes(rows: pa.Table | None) -> set[str]:
    return set() if rows is None else set(rows.column("incarnation").unique().drop_null().to_pylist())


def _divided(root: Location, file: Mapping[str, Any], run: str) -> tuple[pa.Table, pa.Table]:
    """Return the rows of `run` in `file`, and the rows of all other runs in it."""
    table = conform(read_file(root / file["path"], file["dataset"], plain=("run",)), file["dataset"])
    is_own = pc.equal(table.column("run"), run)
    return table.filter(is_own), table.filter(pc.invert(is_own))


def _rewritten(
    root: Location, file: Mapping[str, Any], rewrite: Rewrite, sync: Sync, *, changed: pa.Table | None, others: pa.Table
) -> list[DataFile]:
    """Write the new rows of `file`, and return the new file in a list; the list is empty if no rows remain."""
    remaining = [rows for rows in (changed, others) if rows is not None and rows.num_rows]
    if not remaining:
        return []
    dataset = file["dataset"]
    moves = not others.num_rows and not file["part"].startswith(SHARED_PREFIX) and dataset != "samples"
    part = rewrite.part if moves and rewrite.part else file["part"]
    rows = conform(pa.concat_tables(remaining, promote_options="default"), dataset)
    return [write_file(root, dataset, part, rows, sync, mantissa_bits=file_mantissa_bits(file["path"]))]


LONGEST_NAME: Final = 1000
"""Largest number of characters of a run's name, as the service permits in names from ranks."""

_NUMBERS: Final = {"scalars": "CASE WHEN step IS NULL THEN position END"}

_LIVE: Final = (RunState.PENDING, RunState.RUNNING, RunState.STALLED)
_IMPORTED: Final = "SELECT source_kind FROM runs WHERE run = $run AND source_kind <> 'live'"


def remove(root: Location, run: str, sync: Sync) -> RewriteReport:
    """Remove all rows of `run`.

    An imported run can be imported again. Records of a live run that a rank still has are not necessarily stored again.
    """
    with _without_services(root, run):
        with connect(root) as connection:
            was_imported = connection.query(_IMPORTED, {"run": run}).num_rows > 0
        return apply_rewrite(root, Rewrite(run=run, rows=lambda _: lambda _: None, forgets=was_imported), sync)


def remove_source(
    root: Location, run: str, sync: Sync, incarnations: frozenset[str], *, kind: str, attempts: frozenset[int]
) -> RewriteReport:
    """Remove the rows of one imported log from `run`, so that the log can be imported again.

    `incarnations` are those of the log and its streams. Of the rows without an incarnation, only those in `runs` and
    `attempts` that an import of the format `kind` has stored about one of `attempts` are removed.
    """

    def remaining(rows: pa.Table) -> pa.Table | None:
        is_of_log = pc.is_in(rows.column("incarnation"), pa.array(incarnations, pa.string()))
        if "source_kind" in rows.column_names:
            is_about = pc.is_in(rows.column("attempt"), pa.array(attempts, pa.int32()))
            is_of_kind = pc.fill_null(pc.equal(rows.column("source_kind"), kind), False)
            is_imported = pc.and_(pc.is_null(rows.column("incarnation")), pc.and_(is_about, is_of_kind))
            is_of_log = pc.or_(is_of_log, is_imported)
        kept = rows.filter(pc.invert(is_of_log))
        return rows if kept.num_rows == rows.num_rows else kept

    with _without_services(root, run):
        return apply_rewrite(root, Rewrite(run=run, rows=lambda _: remaining, forgets=True), sync)


def rename(root: Location, run: str, name: str, sync: Sync) -> RewriteReport:
    """Rename `run` to `name`. Raises StoreError if another run has this name."""
    name = redacted_name(name, LONGEST_NAME + 1)
    if not name.strip():
        raise StoreError("the name of a run must not be empty: only samples of other exporters have no run")
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise StoreError(f"the name of a run must consist of at most {LONGEST_NAME} printable characters")

    def rows_of_renamed(version: int) -> RowChange:
        if _highest(root, version, name) is not None:
            raise StoreError(f"a run named {name!r} already exists: `rankscope runs merge` joins two runs")
        return lambda rows: _named(rows, name)

    with _without_services(root, run):
        return apply_rewrite(root, Rewrite(run=run, rows=rows_of_renamed, part=own_part(name)), sync)


def merge(root: Location, run: str, into: str, sync: Sync) -> RewriteReport:
    """Join `run` to the run `into`: all rows of `run` get the name `into`, and its attempts follow those of `into`."""
    if run == into:
        raise StoreError(f"run {run!r} cannot be joined to itself: name two different runs")

    def rows_of_merged(version: int) -> RowChange:
        last = _highest(root, version, into)
        if last is None:
            raise StoreError(f"there is no run named {into!r}: `rankscope runs rename` gives {run!r} this name")
        return lambda rows: _named(_shifted(rows, last), into)

    with _without_services(root, run, into):
        return apply_rewrite(root, Rewrite(run=run, rows=rows_of_merged, part=own_part(into)), sync)


@contextlib.contextmanager
def _without_services(root: Location, *runs: str) -> Iterator[None]:
    """Hold the locks of all shards in the context if any of `runs` is still live according to the store.

    Raises ShardLockError if a service is running, because rows that the service appends would keep the old name.
    """
    with connect(root) as connection:
        states = connection.query("SELECT run, state FROM runs WHERE list_contains($runs, run)", {"runs": list(runs)})
    live = [row for row in states.to_pylist() if row["state"] in _LIVE]
    with contextlib.ExitStack() as held:
        try:
            if live:  # the run may still be marked live although its service was killed
                held.enter_context(all_shards(root, "rankscope runs"))
        except ShardLockError as error:
            raise ShardLockError(
                f"run {live[0]['run']!r} is {live[0]['state']}: wait until it has ended, or stop the service. {error}"
            ) from error
        yield


def _highest(root: Location, version: int, run: str) -> dict[str, int] | None:
    """Return the highest `attempt`, `ordinal` (order of arrival), and position of a record without a step, of `run`.

    The value is -1 for a column without values.

    Returns None if the run has no rows.
    """
    with connect(root, locked=True, version=version) as connection:
        sources = ((name, connection.relation(name, run=run)) for name in DATASETS)
        rows = " UNION ALL BY NAME ".join(
            f"SELECT attempt, ordinal, {_NUMBERS.get(name, 'NULL')} AS position FROM {source} WHERE run = $run"
            for name, source in sources
        )
        highest = ", ".join(f"coalesce(max({name}), -1) AS {name}" for name in ("attempt", "ordinal", "position"))
        found: list[dict[str, int]] = connection.query(
            f"SELECT {highest} FROM ({rows}) HAVING count(*) > 0", {"run": run}
        ).to_pylist()
    return found[0] if found else None


def _named(rows: pa.Table, name: str) -> pa.Table:
    texts = pa.array([name] * rows.num_rows, pa.string())
    return rows.set_column(rows.schema.get_field_index("run"), "run", texts)


def _shifted(rows: pa.Table, last: Mapping[str, int]) -> pa.Table:
    """Return `rows` with increased values: `last` maps each column to a number after which its values continue.

    Only the positions of records without a step increase.
    """
    for column, value in last.items():
        if column not in rows.column_names:
            continue
        before = rows.column(column)
        moved = pc.add(before, pa.scalar(value + 1, before.type))
        if column == "position":
            moved = pc.if_else(pc.is_null(rows.column("step")), moved, before)
        rows = rows.set_column(rows.schema.get_field_index(column), column, moved)
    return rows
