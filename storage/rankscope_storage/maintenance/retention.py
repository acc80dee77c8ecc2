"""Retention: raw rows are kept for some days, rollups for more days. Events and dimensions are kept forever.

The work is divided into jobs. Each job ends in one commit that conflicts with all other rewrites. Either files of raw
rows are removed and files of rollups added, or nothing changes. A process that is killed before the commit has changed
nothing, and the next call continues with the remaining jobs.

From files of raw rows, DuckDB calculates their rollups, and for a divided file the rows that remain. It aggregates on
one thread, outside of the GIL and within MEMORY_LIMIT, so that appends continue on other threads. A killed process
leaves only files that no version contains.

Files with rows that are too old are selected by statistics of the Delta log only. A file is not rolled up before its
last bucket (range of steps) is complete, so that few buckets have several rollup rows of one series. A file with old
and newer rows is divided when its oldest row is too old by more than the `slack` of the limit. For these two reasons,
rows are kept after the limit, but for at most the `slack` longer.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from rankscope_storage.base.datasets import BUCKET_STEPS, ROLLUPS
from rankscope_storage.base.errors import ConflictError, StoreError
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.location import Location
from rankscope_storage.base.schema import conform
from rankscope_storage.files.encoding import DataFile, coarsest, discard, read_file, write_file
from rankscope_storage.files.filesystem import duckdb_errors, filesystem, source
from rankscope_storage.files.sorting import SHARED_PREFIX, SORT_KEYS, file_mantissa_bits
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.log.snapshot import LOG_TIME_STEP, Snapshot, divided
from rankscope_storage.maintenance.retention_policy import RAW, Limit, Retention
from rankscope_storage.sql.rollups import bucket, rollup_query, time_bucket
from rankscope_storage.sql.views import empty_select, files_select

WORK_ROWS: Final = 50_000_000
"""Largest number of rows that one commit rolls up. This takes half a minute, for which a stopping service may wait."""

_BY_DAY: Final = frozenset({"samples"})
"""Datasets in which no file has rows of more than one day."""


File = Mapping[str, Any]
"""One data file as a row of `Snapshot.files`: path, dataset, part, rows, and ranges of columns."""


class RetentionAction(enum.StrEnum):
    """The action of a retention job.

    The text of the value names the replacement for the rows of a file. If the text has "in part", only the rows that
    are too old are replaced.
    """

    GONE = "nothing"
    ROLLED = "rollups"
    CUT = "rollups, in part"
    TRIMMED = "nothing, in part"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionJob:
    """Files that one commit replaces, and the action. Rows from before the time `before` are too old."""

    action: RetentionAction
    files: tuple[File, ...]
    before: dt.datetime


def plan(snapshot: Snapshot, limits: Mapping[str, Limit]) -> list[RetentionJob]:
    """Return the retention jobs at `snapshot`. `limits` has a limit per dataset; other datasets are kept forever."""
    by_dataset: dict[str, list[File]] = {dataset: [] for dataset in limits}
    for file in snapshot.files.to_pylist():
        if file["dataset"] in by_dataset:
            by_dataset[file["dataset"]].append(file)
    too_old = [
        file
        for name, files in by_dataset.items()
        if name not in ROLLUPS
        for file in files
        if _is_old(file, limits[name])
    ]
    jobs = []
    if too_old:
        newest = max(limit.before for limit in limits.values())
        jobs.append(RetentionJob(action=RetentionAction.GONE, files=tuple(too_old), before=newest))
    for name in sorted(by_dataset.keys() - ROLLUPS.keys() - _BY_DAY):
        jobs += _in_part(RetentionAction.TRIMMED, by_dataset[name], limits[name])
    for dataset in ROLLUPS:
        groups: dict[tuple[Any, ...], list[File]] = {}
        for file in by_dataset.get(dataset, ()):
            groups.setdefault((file["part"], file["attempt_min"], file["attempt_max"]), []).append(file)
        for group in groups.values():
            jobs += _rolling(group, limits[dataset])
    return jobs


def _rolling(group: Sequence[File], limit: Limit) -> Iterator[RetentionJob]:
    """Yield the jobs for the files of one part and attempt, of a dataset that has rollups."""
    first_steps = (file["step_min"] for file in group if not _is_old(file, limit) and file["step_min"] is not None)
    next_bucket = min((step // BUCKET_STEPS for step in first_steps), default=None)
    ready = [file for file in group if _is_old(file, limit) and not _waits(file, next_bucket, limit)]
    for files in divided(sorted(ready, key=_step_order), lambda file: int(file["rows"]), WORK_ROWS):
        yield RetentionJob(action=RetentionAction.ROLLED, files=tuple(files), before=limit.before)
    yield from _in_part(RetentionAction.CUT, group, limit)


def _in_part(action: RetentionAction, files: Sequence[File], limit: Limit) -> Iterator[RetentionJob]:
    """Yield the jobs for files with both old and newer rows.

    Such files result from compaction, which merges the rows of many days into one file if a run has few rows.
    """
    for file in files:
        if not _is_old(file, limit) and file["ts_min"] is not None and file["ts_min"] < limit.before - limit.slack:
            yield RetentionJob(action=action, files=(file,), before=limit.before)


def _is_old(file: File, limit: Limit) -> bool:
    """Return whether all rows of `file` are too old; False if the Delta log does not contain their times."""
    return file["ts_max"] is not None and bool(file["ts_max"] < limit.before - LOG_TIME_STEP)


def _waits(file: File, next_bucket: int | None, limit: Limit) -> bool:
    """Return whether newer files may have more rows of the last bucket of `file`, so that it is not rolled up yet.

    `next_bucket` is the lowest bucket of these files. Returns False if `file` is too old by more than the slack.
    """
    if next_bucket is None or file["step_max"] is None or file["ts_max"] < limit.before - limit.slack:
        return False
    return bool(file["step_max"] // BUCKET_STEPS >= next_bucket)


def _step_order(file: File) -> tuple[bool, int, str]:
    return file["step_min"] is None, file["step_min"] or 0, file["path"]


MEMORY_LIMIT: Final = "1GiB"
"""Memory limit of DuckDB for the aggregation of one commit. Data beyond it is written to a temporary folder."""

PIECE_ROWS: Final = 250_000
"""Number of rollup rows of one file.

A row takes about 300 bytes of memory during aggregation, and another 300 bytes during sorting. Compaction does not
merge files of this size."""

SLICE_ROWS: Final = 2_500_000
"""Number of raw rows that are aggregated together.

The sums of so many rows fit into the processor's caches, for any number of series."""

# A bucket is removed if its newest row in the file, of any rank, is too old.
_KEPT_BUCKETS: Final = f"""\
CREATE TEMP TABLE kept_buckets AS
SELECT run, attempt, {bucket()} AS bucket, {time_bucket()} AS time_bucket FROM {{rows}}
GROUP BY ALL HAVING coalesce(max(ts) >= TIMESTAMPTZ '{{before}}', true)
"""
_OF_BUCKET: Final = f"""\
JOIN kept_buckets ON row.run = kept_buckets.run AND row.attempt IS NOT DISTINCT FROM kept_buckets.attempt
  AND {bucket("row.")} IS NOT DISTINCT FROM kept_buckets.bucket
  AND {time_bucket("row.")} IS NOT DISTINCT FROM kept_buckets.time_bucket"""


def roll_up(root: Location, files: Sequence[File], sync: Sync) -> list[DataFile]:
    """Write the rollups of all rows of `files`, which belong to one dataset and part; return the new files."""
    paths = [str(root / file["path"]) for file in files]
    source = f"({files_select(files[0]['dataset'], paths)})"
    with _discard_on_error(root) as written, _database(root) as database:
        sources = (f"(FROM {source} WHERE {where})" for where in slices(paths, files[0]["dataset"]))
        queries = (rollup_query(files[0]["dataset"], source) for source in sources)
        written.extend(_rollups(database, queries, root, files, sync))
    return written


def cut(root: Location, file: File, before: dt.datetime, sync: Sync) -> list[DataFile]:
    """Write the rollups of the buckets of `file` that ended before `before`, and a file with the remaining rows.

    For a dataset without rollups, only the remaining rows are written. Returns the new files; none if no bucket has
    ended.
    """
    dataset, path = file["dataset"], str(root / file["path"])
    content = f"read_parquet({sql_string(path)}, hive_partitioning = false, file_row_number = true)"
    numbered = f"({empty_select(dataset)} UNION ALL BY NAME FROM {content})"  # a file may lack a column
    with _discard_on_error(root) as written, _database(root) as database:
        database.execute(_KEPT_BUCKETS.format(rows=numbered, before=before.isoformat()))
        remaining = database.sql(
            f"SELECT file_row_number AS place FROM {numbered} AS row SEMI {_OF_BUCKET} ORDER BY place"
        )
        places = remaining.to_arrow_table().column("place").to_numpy()
        if len(places) < file["rows"]:
            if dataset in ROLLUPS:
                too_old = f"(SELECT row.* FROM ({files_select(dataset, [path])}) AS row ANTI {_OF_BUCKET})"
                written.extend(_rollups(database, [rollup_query(dataset, too_old)], root, [file], sync))
            if len(places):
                bits = file_mantissa_bits(file["path"])
                remaining_rows = conform(read_file(root / file["path"], dataset).take(pa.array(places)), dataset)
                written.append(write_file(root, dataset, file["part"], remaining_rows, sync, mantissa_bits=bits))
    return written


def rollup_part(part: str) -> str:
    """Return the part (partition) to which the rollups of raw rows in `part` are written.

    Raw rows in shared parts have one part per day; the rollups of these rows have one part per month.
    """
    return part[: len(SHARED_PREFIX) + len("2026-01")] if part.startswith(SHARED_PREFIX) else part


def slices(paths: Sequence[str], dataset: str) -> list[str]:
    """Return SQL conditions that divide the rows of files into slices of whole series, of about SLICE_ROWS rows each.

    All files are sorted by series. According to their footers, a slice needs only a few row groups of each file.
    """
    series = SORT_KEYS[dataset][1]
    groups = sorted(
        itertools.chain.from_iterable(_first_names(pq.read_metadata(source(path)), series) for path in paths)
    )
    cuts: list[str] = []
    rows = 0
    for first, count in groups:
        if rows >= SLICE_ROWS and first > (cuts[-1] if cuts else groups[0][0]):
            cuts.append(first)
            rows = 0
        rows += count
    ends = [sql_string(cut) for cut in cuts]
    if not ends:
        return ["true"]
    between = [f"{series} >= {low} AND {series} < {high}" for low, high in itertools.pairwise(ends)]
    return [f"{series} < {ends[0]}", *between, f"{series} >= {ends[-1]}"]


def _first_names(metadata: pq.FileMetaData, column: str) -> Iterator[tuple[str, int]]:
    """Yield the first name in `column` and the number of rows of each row group of a file.

    Row groups without a stored minimum of `column` are omitted.
    """
    place = metadata.schema.names.index(column)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        statistics = group.column(place).statistics
        if statistics is not None and statistics.has_min_max:
            yield statistics.min, group.num_rows


def _rollups(
    database: duckdb.DuckDBPyConnection, queries: Iterable[str], root: Location, files: Sequence[File], sync: Sync
) -> Iterator[DataFile]:
    """Execute the rollup `queries` over rows of `files`, write the result, and yield the new files."""
    name, part = ROLLUPS[files[0]["dataset"]], rollup_part(files[0]["part"])
    bits = coarsest(file["path"] for file in files)
    readers = (database.sql(query).to_arrow_reader(PIECE_ROWS // 10) for query in queries)
    for rows in _pieces(itertools.chain.from_iterable(readers)):
        yield write_file(root, name, part, conform(rows, name), sync, mantissa_bits=bits)


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(_coded(batch))
        if sum(one.num_rows for one in held) >= PIECE_ROWS:
            yield pa.Table.from_batches(held)
            held = []
    if any(batch.num_rows for batch in held):
        yield pa.Table.from_batches(held)


def _coded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return `batch` with dictionary-encoded texts.

    Hundreds of thousands of rows contain only a few hundred different names.
    """
    columns = [column.dictionary_encode() if pa.types.is_string(column.type) else column for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


@contextlib.contextmanager
def _database(root: Location) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a separate DuckDB instance, whose temporary files are in a folder that is deleted at the end."""
    files = filesystem(root)
    with files.scratch(root) as folder, duckdb.connect(config={"threads": 1}) as database, duckdb_errors():
        files.attach(database)
        database.execute(
            f"SET TimeZone = 'UTC'; SET memory_limit = '{MEMORY_LIMIT}'; SET preserve_insertion_order = false"
        )
        database.execute(f"SET temp_directory = {sql_string(str(folder))}")
        yield database


@contextlib.contextmanager
def _discard_on_error(root: Location) -> Iterator[list[DataFile]]:
    """Yield a list to which the caller adds written files. If an error occurs, delete these files.

    Raises ConflictError if a file to roll up no longer exists, and StoreError for other errors of the disk or DuckDB.
    """
    files: list[DataFile] = []
    try:
        yield files
    except (FileNotFoundError, duckdb.IOException) as error:
        discard(root, files)
        raise ConflictError(f"a file to roll up was deleted: {error}") from error
    except (OSError, pa.ArrowException, duckdb.Error) as error:
        discard(root, files)
        raise StoreError(f"cannot roll up files of {root}: {error}") from error


__all__ = ["RAW", "Retention", "RetentionReport", "retain"]

_RETRIES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionReport:
    """The result of a retention run, or of a dry run. `groups` has a row per dataset, part and action.

    Rows that remain of divided files are not counted as removed. A dry run does not read these files and counts all
    their rows. `left` is the number of jobs that were not started. `refused` is the number of jobs with files that
    another process replaced. `failed` has a reason for each other job that failed, such as an unreadable file.
    """

    files: int = 0
    rows: int = 0
    size_bytes: int = 0
    added_rows: int = 0
    added_bytes: int = 0
    left: int = 0
    refused: int = 0
    failed: tuple[str, ...] = ()
    groups: pa.Table = field(default_factory=lambda: _groups(()))


def retain(
    root: Location,
    retention: Retention,
    sync: Sync,
    *,
    now: dt.datetime,
    dry_run: bool = False,
    works: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RetentionReport:
    """Roll up and remove the rows of the store at `root` that are too old at `now`.

    Vacuum frees their disk space later.

    Makes at most `works` commits. `progress` is called with the number of finished jobs and the number of all jobs.
    Raises ConflictError if compactions prevent a commit repeatedly.
    """
    log = Log.open(root, sync)
    planned = plan(log.snapshot(), retention.limits(now))
    if dry_run:
        return _report(planned)
    if any(job.action in {RetentionAction.ROLLED, RetentionAction.CUT} for job in planned):
        log.add_missing_columns()  # only a table of an older release lacks them
    done: list[RetentionJob] = []
    rollups: list[DataFile] = []
    remaining: list[DataFile] = []
    refused, failed, begun = 0, [], 0
    for begun, job in enumerate(planned, 1):
        try:
            files = _apply_job(log, job, sync)
        except _ReplacedError:
            refused += 1
        except ConflictError:
            raise
        except StoreError as error:  # an unreadable file must not block the retention of others
            failed.append(str(error))
        else:
            if files is not None:
                done.append(job)
                remaining += [file for file in files if file.dataset == job.files[0]["dataset"]]
                rollups += [file for file in files if file.dataset != job.files[0]["dataset"]]
        if progress is not None:
            progress(begun, len(planned))
        if len(done) == works:
            break
    return _report(done, rollups, remaining, left=len(planned) - begun, refused=refused, failed=tuple(failed))


class _ReplacedError(ConflictError):
    """Another process has replaced files of a retention job. The caller must plan the job again."""


def _apply_job(log: Log, job: RetentionJob, sync: Sync) -> list[DataFile] | None:
    """Replace the files of `job`, and return the new files; None if no bucket of steps in the files is too old."""

    def check_unchanged() -> None:
        if not log.snapshot().contains([file["path"] for file in job.files]):
            raise _ReplacedError("another process has replaced files of a retention job: plan the job again")

    def build() -> Change:
        check_unchanged()  # the rollups are still correct if the files exist, because files never change
        return Change(
            added=added,
            removed=[DataFile.from_snapshot(file) for file in job.files],
            info={"rankscopeRetention": f"rows before {job.before.isoformat()} became {job.action}"},
            rewrites=True,  # rollups have no new rows
        )

    check_unchanged()
    added: list[DataFile] = []
    if job.action is RetentionAction.ROLLED:
        added = roll_up(log.root, job.files, sync)
    elif job.action in {RetentionAction.CUT, RetentionAction.TRIMMED}:
        added = cut(log.root, job.files[0], job.before, sync)
        if not added:
            return None
    try:
        log.replace_files(build, tries=_RETRIES, reuse_files=True)
    except ConflictError:  # after any other error, the commit may have been stored
        discard(log.root, added)
        raise
    return added


def _report(
    jobs: Sequence[RetentionJob],
    rollups: Sequence[DataFile] = (),
    remaining: Sequence[DataFile] = (),
    *,
    left: int = 0,
    refused: int = 0,
    failed: tuple[str, ...] = (),
) -> RetentionReport:
    files = [file for job in jobs for file in job.files]
    return RetentionReport(
        files=len(files),
        rows=sum(file["rows"] for file in files) - sum(file.rows for file in remaining),
        size_bytes=sum(file["size_bytes"] for file in files) - sum(file.size_bytes for file in remaining),
        added_rows=sum(file.rows for file in rollups),
        added_bytes=sum(file.size_bytes for file in rollups),
        left=left,
        refused=refused,
        failed=failed,
        groups=_groups(jobs),
    )


def _groups(jobs: Sequence[RetentionJob]) -> pa.Table:
    keys = {"dataset": pa.string(), "part": pa.string(), "becomes": pa.string()}
    schema = pa.schema({**keys, "rows": pa.int64(), "size_bytes": pa.int64()}.items())
    files = [{**file, "becomes": job.action} for job in jobs for file in job.files]
    rows = pa.Table.from_pylist([{name: file[name] for name in schema.names} for file in files], schema=schema)
    sums = [("rows", "count"), ("rows", "sum"), ("size_bytes", "sum")]
    grouped = rows.group_by(list(keys)).aggregate(sums).sort_by("size_bytes_sum")
    return grouped.select([*keys, "rows_count", "rows_sum", "size_bytes_sum"]).rename_columns(
        [*keys, "files", "rows", "bytes"]
    )
