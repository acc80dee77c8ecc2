"""Files of raw rows read, and what stays of them written: rollups, and the rows of a cut file that are young enough.

DuckDB sums on one thread, outside the GIL and within MEMORY_LIMIT: appends go on on the others. Nothing is committed
here, so what dies here leaves only files that no version names.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rankscope_contract.model.rollups import ROLLUPS
from rankscope_contract.security.escaping import sql_string
from rankscope_storage.base.errors import ConflictError, StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.base.schema import conform
from rankscope_storage.files.encoding import coarsest
from rankscope_storage.files.parquet import STAGING, DataFile, discard, open_file, write_file
from rankscope_storage.files.partitioning import SHARED_PREFIX, file_mantissa_bits
from rankscope_storage.files.sorting import SORT_KEYS
from rankscope_storage.maintenance.retention_plan import File
from rankscope_storage.sql.rollups import bucket, facts_query, rollup_query, row_facts, time_bucket
from rankscope_storage.sql.views import empty_select, files_select

MEMORY_LIMIT: Final = "1GiB"
"""What the sums of one commit may take; beyond it they go by way of `_staging/`."""

PIECE_ROWS: Final = 250_000
"""Rollup rows of one file: some 300 bytes each while they are put together, and as much again while they are sorted.
More than what compaction would merge with others."""

SLICE_ROWS: Final = 2_500_000
"""Rows that are summed up together: their sums stay in memory that is near, however many series there are."""

# A bucket goes when the youngest row that the file has of it, of whatever rank, is too old.
_STAYING: Final = f"""\
CREATE TEMP TABLE staying AS
SELECT run, attempt, {bucket()} AS bucket, {time_bucket()} AS time_bucket FROM {{rows}}
GROUP BY ALL HAVING coalesce(max(ts) >= TIMESTAMPTZ '{{before}}', true)
"""
_OF_BUCKET: Final = f"""\
JOIN staying ON row.run = staying.run AND row.attempt IS NOT DISTINCT FROM staying.attempt
  AND {bucket("row.")} IS NOT DISTINCT FROM staying.bucket
  AND {time_bucket("row.")} IS NOT DISTINCT FROM staying.time_bucket"""


def roll_up(root: Path, files: Sequence[File], sync: Sync) -> list[DataFile]:
    """Write the rollups of all rows of `files`, which are of one dataset and part, and return the new files."""
    paths = [str(root / file["path"]) for file in files]
    source = f"({files_select(files[0]['dataset'], paths)})"
    with _written(root) as written, _engine(root) as engine:
        sources = (f"(FROM {source} WHERE {where})" for where in slices(paths, files[0]["dataset"]))
        questions = (_cheapest(engine, files[0]["dataset"], source) for source in sources)
        written.extend(_rollups(engine, questions, root, files, sync))
    return written


def cut(root: Path, file: File, before: dt.datetime, sync: Sync) -> list[DataFile]:
    """Write the rollups of the buckets of `file` that ended before `before`, and the rest of its rows as they are.

    Of a dataset without rollups it is just the rest. Returns the new files; none when no bucket has ended.
    """
    dataset, path = file["dataset"], str(root / file["path"])
    content = f"read_parquet({sql_string(path)}, hive_partitioning = false, file_row_number = true)"
    numbered = f"({empty_select(dataset)} UNION ALL BY NAME FROM {content})"  # it may lack a column
    with _written(root) as written, _engine(root) as engine:
        engine.execute(_STAYING.format(rows=numbered, before=before.isoformat()))
        stays = engine.sql(f"SELECT file_row_number AS place FROM {numbered} AS row SEMI {_OF_BUCKET} ORDER BY place")
        places = stays.to_arrow_table().column("place").to_numpy()
        if len(places) < file["rows"]:
            if dataset in ROLLUPS:
                going = f"(SELECT row.* FROM ({files_select(dataset, [path])}) AS row ANTI {_OF_BUCKET})"
                written.extend(_rollups(engine, [rollup_query(dataset, going)], root, [file], sync))
            if len(places):
                rest, bits = conform(_read(path, dataset, places), dataset), file_mantissa_bits(file["path"])
                written.append(write_file(root, dataset, file["part"], rest, sync, mantissa_bits=bits))
    return written


def rollup_part(part: str) -> str:
    """Return the part of the rollups of `part`: days that many runs share become months."""
    return part[: len(SHARED_PREFIX) + len("2026-01")] if part.startswith(SHARED_PREFIX) else part


def slices(paths: Sequence[str], dataset: str) -> list[str]:
    """Return conditions that divide the rows of files into slices of whole series, of about SLICE_ROWS each.

    Each file has them in this order, so that a slice is a few of its row groups, as their footers tell.
    """
    series = SORT_KEYS[dataset][1]
    groups = sorted(itertools.chain.from_iterable(_first_names(pq.read_metadata(path), series) for path in paths))
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
    """Yield the first name in each row group, and its rows; none where the footer does not tell."""
    place = metadata.schema.names.index(column)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        statistics = group.column(place).statistics
        if statistics is not None and statistics.has_min_max:
            yield statistics.min, group.num_rows


def _cheapest(engine: duckdb.DuckDBPyConnection, dataset: str, source: str) -> str:
    """Return the query for the rollups of `source` that sums up only what may differ; to look takes a tenth of it."""
    looked = engine.sql(facts_query(dataset, source))
    [row] = looked.fetchall()
    return rollup_query(dataset, source, row_facts(dict(zip(looked.columns, row, strict=True))))


def _rollups(
    engine: duckdb.DuckDBPyConnection, questions: Iterable[str], root: Path, files: Sequence[File], sync: Sync
) -> Iterator[DataFile]:
    """Write the rollups that `questions` ask for, all of them of rows of `files`."""
    name, part = ROLLUPS[files[0]["dataset"]], rollup_part(files[0]["part"])
    bits = coarsest(file["path"] for file in files)
    readers = (engine.sql(question).to_arrow_reader(PIECE_ROWS // 10) for question in questions)
    for rows in _pieces(itertools.chain.from_iterable(readers)):
        yield write_file(root, name, part, conform(rows, name), sync, mantissa_bits=bits)


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    kept: list[pa.RecordBatch] = []
    for batch in batches:
        kept.append(_coded(batch))
        if sum(one.num_rows for one in kept) >= PIECE_ROWS:
            yield pa.Table.from_batches(kept)
            kept = []
    if any(batch.num_rows for batch in kept):
        yield pa.Table.from_batches(kept)


def _coded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return `batch` with its texts as codes: names by the hundred thousand, of which there are a few hundred."""
    columns = [column.dictionary_encode() if pa.types.is_string(column.type) else column for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _read(path: str, dataset: str, places: npt.NDArray[np.int64]) -> pa.Table:
    """Return the rows at `places`, which rise; the others of a row group are let go of before the next is read."""
    content = open_file(Path(path), dataset)
    kept, first = [], 0
    for number in range(content.metadata.num_row_groups):
        end = first + content.metadata.row_group(number).num_rows
        here = places[np.searchsorted(places, first) : np.searchsorted(places, end)] - first
        if len(here):
            kept.append(content.read_row_group(number).take(pa.array(here)))
        first = end
    return pa.concat_tables(kept)


@contextlib.contextmanager
def _engine(root: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a DuckDB of its own; it writes nothing beside the folder that is removed in the end."""
    beside = root / STAGING / f"rolling-{uuid.uuid4().hex}"
    engine = duckdb.connect(config={"threads": 1})
    try:
        engine.execute(
            f"SET TimeZone = 'UTC'; SET memory_limit = '{MEMORY_LIMIT}'; SET preserve_insertion_order = false"
        )
        engine.execute(f"SET temp_directory = {sql_string(str(beside))}")
        yield engine
    finally:
        engine.close()
        shutil.rmtree(beside, ignore_errors=True)


@contextlib.contextmanager
def _written(root: Path) -> Iterator[list[DataFile]]:
    """Yield a list for the files that are written; they are removed again when they do not all come to be."""
    files: list[DataFile] = []
    try:
        yield files
    except (FileNotFoundError, duckdb.IOException) as error:
        discard(root, files)
        raise ConflictError(f"a file to roll up has gone: {error}") from error
    except (OSError, pa.ArrowException, duckdb.Error) as error:
        discard(root, files)
        raise StoreError(f"cannot roll up files of {root}: {error}") from error
