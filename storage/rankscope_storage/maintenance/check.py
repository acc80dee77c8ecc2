"""Check a store: compare all files with the Delta log, and search for rows that were stored twice.

The check only reads, so that a service may run at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pyarrow.compute as pc

from rankscope_contract.model.schema import BUCKET_STEPS, DATASETS, DIMENSIONS, ROLLUPS, TENSOR_ROW_KEY
from rankscope_storage.base.errors import StoreError, TornLogError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.connection import Connection, connect
from rankscope_storage.files.encoding import STAGING
from rankscope_storage.log.delta import REMOVED_FILES_HOURS, Log
from rankscope_storage.log.entries import LOG_FOLDER, empty_entries, entries, torn_entries
from rankscope_storage.log.snapshot import Snapshot
from rankscope_storage.maintenance.file_check import CheckReport, Finding, FindingKind, check_file, size_of
from rankscope_storage.sql.rollups import NUMBERS

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


def check(root: Path, *, deep: bool = False, progress: Progress | None = None) -> CheckReport:
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


def _torn(root: Path) -> Iterator[Finding]:
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
    unused = [path for path in snapshot.root.glob("dataset=*/part=*/*.parquet") if str(path) not in used]
    staged = list((snapshot.root / STAGING).glob("*"))
    due = ""
    with contextlib.suppress(StoreError):  # a file that cannot be read now, which is a finding too
        due = f"; {len(log.unused_files(REMOVED_FILES_HOURS))} are due"
    for kind, paths, when in (
        (FindingKind.UNUSED, unused, f"{REMOVED_FILES_HOURS} hours{due}"),
        (FindingKind.STAGED, staged, "an hour"),
    ):
        if paths:
            text = f"{len(paths)}, {sum(map(size_of, paths))} bytes: vacuum deletes them after {when}"
            yield Finding(kind=kind, path=paths[0].parent.name, text=text)


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
