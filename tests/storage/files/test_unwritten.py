"""Columns that are null in all rows of a dataset are not written, and every reader reads them as null."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from tests.storage.rows import ask, entries, put

from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import UNWRITTEN, dataset_schema
from rankscope_storage.maintenance import compaction
from rankscope_storage.maintenance.check import check
from rankscope_storage.maintenance.retention import Retention, retain
from rankscope_storage.runs.edit import rename

START = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
NEVER = set(UNWRITTEN["samples"])


def append(writer, *rows: dict) -> None:
    usual = {"run": "", "ts": START, "ts_origin": "ingest", "target": "h:1", "metric": "m", "value": 1.0}
    put(writer, "samples", rows, **usual)


def columns(connection) -> list[set[str]]:
    return [set(pq.ParquetFile(path).schema_arrow.names) for path in map(Path, connection.files("samples"))]


def test_file_of_samples_lacks_null_columns_and_the_view_has_all(writer, connection):
    append(writer, {"value": 2.0}, {"metric": "n", "labels": "{}"})
    found = connection.query("FROM samples ORDER BY metric")

    assert [set(dataset_schema("samples").names) - NEVER] == columns(connection)
    assert dataset_schema("samples").names == found.column_names
    assert [2.0, 1.0] == found.column("value").to_pylist()
    assert all(found.column(name).null_count == 2 for name in NEVER)
    assert [(0,)] == ask(connection, "SELECT count(*) FROM samples WHERE step > 5 OR run = 'x'")
    assert check(connection.path, deep=True).is_intact


def test_sample_with_usually_null_columns_survives_a_merge(writer, connection, monkeypatch):
    monkeypatch.setattr(compaction, "SMALL_FILES", 2)
    append(writer, {"value": 2.0, "step": 7, "rank": 3, "incarnation": "i"})
    asked = "SELECT value, step, rank, incarnation FROM samples ORDER BY value"
    assert [(2.0, 7, 3, "i")] == ask(connection, asked)  # all files have all columns, as in the previous release
    append(writer, {"value": 1.0})
    append(writer, {"value": 3.0})
    expected = [(1.0, None, None, None), (2.0, 7, 3, "i"), (3.0, None, None, None)]

    assert sorted(map(len, columns(connection))) == [len(dataset_schema("samples")) - len(NEVER)] * 2 + [15]
    assert expected == ask(connection, asked)
    writer.compact()
    assert 1 == len(connection.files("samples"))
    assert expected == ask(connection, asked)


def test_run_of_samples_is_checked_against_the_log(writer, connection):
    append(writer, {"run": "a"})
    entry = entries(connection.path)[-1]
    entry.write_text(entry.read_text().replace('\\"run\\":\\"a\\"', '\\"run\\":\\"b\\"'))

    assert not check(connection.path, deep=True).is_intact


def test_delta_reader_reads_unwritten_columns_as_null(writer, connection):
    append(writer, {"value": 1.0})
    append(writer, {"value": 2.0, "step": 7})
    told = DeltaTable(str(connection.path)).to_pyarrow_dataset().to_table(columns=["value", "step", "rank"])

    assert [(1.0, None, None), (2.0, 7, None)] == sorted((r["value"], r["step"], r["rank"]) for r in told.to_pylist())


def test_rename_and_retention_work_on_files_without_null_columns(writer, connection):
    append(writer, {"run": "old", "ts": START}, {"run": "", "ts": START + dt.timedelta(days=3), "value": 5.0})
    writer.close()
    rename(connection.path, "old", "new", sync_to_disk)

    assert [("", 5.0), ("new", 1.0)] == ask(connection, "SELECT run, value FROM samples ORDER BY run")
    retain(connection.path, Retention(samples_days=1), sync_to_disk, now=START + dt.timedelta(days=3, hours=2))
    assert [("", 5.0)] == ask(connection, "SELECT run, value FROM samples")


def test_usually_null_column_is_stored_if_it_has_a_value(writer, connection):
    for name in NEVER:
        value = "x" if dataset_schema("samples").field(name).type == pa.string() else 1
        append(writer, {name: value})

        assert [(value,)] == ask(connection, f'SELECT "{name}" FROM samples WHERE "{name}" IS NOT NULL')
