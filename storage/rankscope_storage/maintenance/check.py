"""Check a store: compare all files with the Delta log, and search for rows that were stored twice.

The check only reads, so that a service may run at the same time.

Findings about a file come from its comparison with its entry in the Delta log.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rankscope_contract import SCHEMA_VERSION
from rankscope_storage.base.datasets import BUCKET_STEPS, DATASETS, DIMENSIONS, ROLLUPS, TENSOR_ROW_KEY
from rankscope_storage.base.errors import StoreError, TornLogError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.location import Location
from rankscope_storage.base.schema import DATASET_KEY, schema_version
from rankscope_storage.connection import Connection, connect
from rankscope_storage.files.encoding import has_older_integers
from rankscope_storage.files.filesystem import DATA_FILES, STAGING, filesystem
from rankscope_storage.files.local import Status
from rankscope_storage.log.delta import REMOVED_FILES_HOURS, Log
from rankscope_storage.log.entries import LOG_FOLDER, empty_entries, entries, torn_entries
from rankscope_storage.log.snapshot import Snapshot
from rankscope_storage.sql.rollups import NUMBERS


class FindingKind(enum.StrEnum):
    """The kind of a finding of a store check. `is_damage` is true for damage, false for information."""

    TORN_LOG = "torn log entry"
    MISSING = "missing file"
    UNREADABLE = "unreadable file"
    OUT_OF_REACH = "file out of reach"
    OTHER_SIZE = "size differs from the log"
    OTHER_CONTENT = "content differs from the log"
    DUPLICATES = "rows stored twice"
    EMPTY_ENTRY = "empty log entry"
    ALIKE = "rows alike"
    GAP = "records missing"
    OLDER_INTEGERS = "older encoding"
    UNUSED = "unused files"
    STAGED = "unfinished files"

    @property
    def is_damage(self) -> bool:
        """Return whether the finding is damage: rows are lost or stored twice, or queries cannot find them."""
        return self not in (
            FindingKind.EMPTY_ENTRY,
            FindingKind.ALIKE,
            FindingKind.GAP,
            FindingKind.OLDER_INTEGERS,
            FindingKind.UNUSED,
            FindingKind.STAGED,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding of a check: its kind, the path of the file, and an explanation."""

    kind: FindingKind
    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The result of a check: its findings and the size of the checked store.

    `version` is None if the Delta log is unreadable.
    """

    version: int | None
    files: int = 0
    rows: int = 0
    size_bytes: int = 0
    findings: tuple[Finding, ...] = ()

    @property
    def is_intact(self) -> bool:
        """Return True if the store is intact: no finding of the check is damage."""
        return not any(finding.kind.is_damage for finding in self.findings)


_RANGES: Final = ("run", "attempt", "step")
"""Columns whose range in the Delta log selects files: with a wrong range, queries would not find the rows."""


def check_file(root: Location, file: Mapping[str, Any], *, deep: bool, content: bytes | None = None) -> Finding | None:
    """Return the defect of `file`, a row of `Snapshot.files`, or its older encoding, or None.

    With `deep`, every value of the file is decoded. If `content` is given, the file is not read again.
    """
    defect = _defect(root / file["path"], file, content, deep=deep)
    return defect and Finding(kind=defect[0], path=file["path"], text=f"{defect[1]}; {describe_rows(file)}")


def _defect(
    path: Location, file: Mapping[str, Any], content: bytes | None, *, deep: bool
) -> tuple[FindingKind, str] | None:
    try:
        status = filesystem(path).head(path) if content is None else Status(path, len(content), 0.0)
        if status is None:
            return FindingKind.MISSING, "does not exist"
        if status.size != file["size_bytes"]:
            return FindingKind.OTHER_SIZE, f"has {status.size} bytes, {file['size_bytes']} in the log"
        parquet = pq.ParquetFile(filesystem(path).open(path) if content is None else pa.BufferReader(content))
        for text in _differences(parquet.metadata, file):
            return FindingKind.OTHER_CONTENT, text
        if deep:
            for group in range(parquet.metadata.num_row_groups):
                parquet.read_row_group(group)
        if has_older_integers(parquet.metadata):
            return FindingKind.OLDER_INTEGERS, "has integers in an older encoding"
    except FileNotFoundError:
        return FindingKind.MISSING, "does not exist"
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:  # Arrow reports damage as OSError without a number
            return FindingKind.OUT_OF_REACH, f"cannot be read now ({os.strerror(error.errno)})"
        return FindingKind.UNREADABLE, f"cannot be decoded: {str(error).splitlines()[0]}"
    return None


def _differences(metadata: pq.FileMetaData, file: Mapping[str, Any]) -> Iterator[str]:
    own = metadata.metadata or {}
    declared = own.get(DATASET_KEY.encode())
    if declared is None:  # another tool wrote the file, for example OPTIMIZE by delta-rs
        needed = (field.name for field in DATASETS.get(file["dataset"], ()) if not field.nullable)
        if missing := sorted(set(needed) - set(metadata.schema.names)):
            yield f"lacks the columns {', '.join(missing)} of the dataset {file['dataset']}"
    elif declared != file["dataset"].encode():
        yield f"does not declare the dataset {file['dataset']}"
    if schema_version(own) > SCHEMA_VERSION:
        yield f"has schema version {schema_version(own)}, and this Rankscope supports up to {SCHEMA_VERSION}"
    if file["rows"] not in {None, metadata.num_rows}:
        yield f"has {metadata.num_rows} rows, {file['rows']} in the log"
    for column in _RANGES:
        found, logged = footer_range(metadata, column), (file[f"{column}_min"], file[f"{column}_max"])
        if found is not None and logged[0] is not None and found != logged:
            yield f"has {column} {found[0]} to {found[1]}, {logged[0]} to {logged[1]} in the log"


def footer_range(metadata: pq.FileMetaData, column: str) -> tuple[Any, Any] | None:
    """Return minimum and maximum of `column` over all row groups of a file.

    None if the footer does not contain them.
    """
    index = metadata.schema.names.index(column) if column in metadata.schema.names else None
    lows, highs = [], []
    for group in range(metadata.num_row_groups if index is not None else 0):
        chunk = metadata.row_group(group).column(index)
        counted = chunk.statistics
        if counted is not None and counted.has_min_max:
            lows.append(counted.min)
            highs.append(counted.max)
        elif counted is None or counted.null_count != chunk.num_values:
            return None
    return (min(lows), max(highs)) if lows else None


def describe_rows(file: Mapping[str, Any]) -> str:
    """Return a text that describes the rows of `file`: dataset, run, steps and their number."""
    run = file["run_min"] if file["run_min"] == file["run_max"] else f"{file['run_min']} to {file['run_max']}"
    steps = "" if file["step_min"] is None else f", steps {file['step_min']} to {file['step_max']}"
    return f"{file['rows']} rows of {file['dataset']}, run {run}{steps}"


Progress = Callable[[int, int], None]
"""Function that receives the number of checked files and the number of all files."""

_SHOWN: Final = 20
"""Largest number of incarnations with missing records that a report lists."""

_DUPLICATES: Final = """\
SELECT coalesce(sum(copies - 1), 0)::BIGINT AS rows FROM (
  SELECT count(*) AS copies FROM tensor_stats WHERE incarnation IS NOT NULL GROUP BY {key} HAVING count(*) > 1)
"""
# Other datasets have no key, because a script may log a number twice. But it does not log all rows of a record twice,
# unless the record has only one row of the dataset.
_RECORDS_TWICE: Final = """\
SELECT coalesce(sum(rows - rows // fold) FILTER (contents > 1), 0)::BIGINT AS rows,
  coalesce(sum(rows - rows // fold) FILTER (contents = 1), 0)::BIGINT AS possible
FROM (
  SELECT sum(copies) AS rows, min(copies) AS fold, count(*) AS contents
  FROM (
    SELECT incarnation, seq, hash({columns}, CASE WHEN ts_origin <> 'ingest' THEN ts END) AS content, count(*) AS copies
    FROM {dataset} WHERE incarnation IS NOT NULL AND seq IS NOT NULL GROUP BY ALL
  )
  GROUP BY incarnation, seq HAVING fold > 1)
"""
_OF_THE_STORE: Final = {"run", "attempt", "rank", "incarnation", "seq", "ordinal", "ts", "ts_origin"}
"""Columns in which two copies of a row may differ. They change if the run is renamed or if a row is stored again."""
_IMPOSSIBLE: Final = f"""\
SELECT count(*) AS rows FROM {{rollups}}
WHERE rows < 1 OR first_ts > ts OR first_step < step OR last_step < first_step OR last_step - step >= {BUCKET_STEPS}
  OR {{wrong}}
"""
_GAPS: Final = """\
SELECT run, incarnation, min(seq) AS first, max(seq) AS last, max(seq) - min(seq) + 1 - count(DISTINCT seq) AS missing
FROM ({records}) GROUP BY run, incarnation HAVING missing > 0 ORDER BY missing DESC, incarnation
"""


def check(root: Location, *, deep: bool = False, progress: Progress | None = None) -> CheckReport:
    """Compare the store at `root` with its Delta log, and return the findings.

    With `deep`, the check also decodes every value and searches for rows that were stored twice.
    """
    torn = tuple(_torn(root))
    try:
        log = Log.open(root, sync_to_disk)
    except TornLogError as error:
        unreadable = Finding(kind=FindingKind.TORN_LOG, path=str(root / LOG_FOLDER), text=str(error))
        return CheckReport(version=None, findings=torn or (unreadable,))
    snapshot = log.snapshot()
    text = (
        "a commit without actions: power failed before its content was written, and none of its rows was acknowledged"
    )
    empty = [
        Finding(kind=FindingKind.EMPTY_ENTRY, path=f"{LOG_FOLDER}/{entry.name}", text=text)
        for entry in empty_entries(root)
    ]
    findings = [*torn, *empty, *_files(snapshot, deep=deep, progress=progress), *_unused(log, snapshot)]
    if deep and not any(finding.kind.is_damage for finding in findings):
        with connect(root, locked=True, version=snapshot.version) as connection:
            findings += [*_duplicates(connection), *_contradictions(connection), *_gaps(connection)]
    files = snapshot.files
    return CheckReport(
        version=snapshot.version,
        files=files.num_rows,
        rows=pc.sum(files["rows"]).as_py() or 0,
        size_bytes=sum(files["size_bytes"].to_pylist()),
        findings=tuple(findings),
    )


def _torn(root: Location) -> Iterator[Finding]:
    newest = entries(root)[-1:]
    for entry in torn_entries(root):
        text = "none of its rows was acknowledged: `rankscope store repair` moves it away"
        if [entry] != newest:
            text = "later entries exist"
        yield Finding(kind=FindingKind.TORN_LOG, path=f"{LOG_FOLDER}/{entry.name}", text=text)


def _files(snapshot: Snapshot, *, deep: bool, progress: Progress | None) -> Iterator[Finding]:
    files = snapshot.files.to_pylist()
    older = []
    for done, file in enumerate(files, 1):
        finding = check_file(snapshot.root, file, deep=deep)
        if finding is not None and finding.kind is FindingKind.OLDER_INTEGERS:
            older.append(file)
        elif finding is not None:
            yield finding
        if progress is not None:
            progress(done, len(files))
    if older:
        size = sum(file["size_bytes"] for file in older)
        text = (
            f"{len(older)} files, {size} bytes, have integers that some readers, such as DuckDB 1.4 or fastparquet, "
            "cannot read: `rankscope store compact --rewrite` rewrites these files"
        )
        yield Finding(kind=FindingKind.OLDER_INTEGERS, path=older[0]["path"], text=text)


def _unused(log: Log, snapshot: Snapshot) -> Iterator[Finding]:
    used = {f"{snapshot.root}/{path}" for path in snapshot.files["path"].to_pylist()}
    unused = [one for one in filesystem(snapshot.root).list(snapshot.root, DATA_FILES) if str(one.path) not in used]
    staged = filesystem(snapshot.root).list(snapshot.root / STAGING)
    due = ""
    with contextlib.suppress(StoreError):  # a file that cannot be read now, which is a finding too
        due = f"; {len(log.unused_files(REMOVED_FILES_HOURS))} are due"
    for kind, found, when in (
        (FindingKind.UNUSED, unused, f"{REMOVED_FILES_HOURS} hours{due}"),
        (FindingKind.STAGED, staged, "an hour"),
    ):
        if found:
            text = f"{len(found)}, {sum(one.size for one in found)} bytes: vacuum deletes them after {when}"
            yield Finding(kind=kind, path=found[0].path.parent.name, text=text)


def _duplicates(connection: Connection) -> Iterator[Finding]:
    key = ", ".join(f'"{name}"' for name in TENSOR_ROW_KEY)
    (found,) = connection.query(_DUPLICATES.format(key=key)).to_pylist()
    if found["rows"]:
        text = f"{found['rows']} rows more than there are keys ({', '.join(TENSOR_ROW_KEY)})"
        yield Finding(kind=FindingKind.DUPLICATES, path="tensor_stats", text=text)
    for dataset in sorted(DATASETS.keys() - {"tensor_stats", *DIMENSIONS, *ROLLUPS.values()}):
        columns = ", ".join(f'"{field.name}"' for field in DATASETS[dataset] if field.name not in _OF_THE_STORE)
        (found,) = connection.query(_RECORDS_TWICE.format(columns=columns, dataset=dataset)).to_pylist()
        if found["rows"]:
            text = f"{found['rows']} rows more than their records have (incarnation, seq)"
            yield Finding(kind=FindingKind.DUPLICATES, path=dataset, text=text)
        if found["possible"]:
            text = f"{found['possible']} rows repeat the only row of {dataset} in their record: stored or logged twice"
            yield Finding(kind=FindingKind.ALIKE, path=dataset, text=text)


def _contradictions(connection: Connection) -> Iterator[Finding]:
    """Yield a finding for each dataset that has a rollup row in which the numbers contradict each other."""
    for dataset, rollups in ROLLUPS.items():
        wrong = " OR ".join(
            f"coalesce({name}_count, 0) + coalesce({name}_nans, 0) + coalesce({name}_infs, 0) > rows "
            f"OR {name}_min > {name}_max"
            for name in NUMBERS[dataset]
        )
        (found,) = connection.query(_IMPOSSIBLE.format(rollups=rollups, wrong=wrong)).to_pylist()
        if found["rows"]:
            text = f"{found['rows']} rollups are not the sum of any rows"
            yield Finding(kind=FindingKind.OTHER_CONTENT, path=rollups, text=text)


def _gaps(connection: Connection) -> Iterator[Finding]:
    measured = (dataset for dataset in DATASETS if dataset not in DIMENSIONS)
    select = "SELECT run, incarnation, seq FROM {} WHERE incarnation IS NOT NULL AND seq IS NOT NULL"
    records = " UNION ".join(select.format(dataset) for dataset in measured)
    rows = connection.query(_GAPS.format(records=records)).to_pylist()
    for row in rows[:_SHOWN]:
        missing = f"{row['missing']} of seq {row['first']} to {row['last']}"
        text = f"{missing} have no row: lost, rolled up, or not sampled"
        yield Finding(kind=FindingKind.GAP, path=f"run {row['run']}, incarnation {row['incarnation']}", text=text)
