"""Parquet files with every column, as any reader of Parquet sees them."""

from __future__ import annotations

import math

import duckdb
import pyarrow.parquet as pq
import pytest
from tests.storage.formats.conftest import row, scalar, tensor

from rankscope_storage.base.errors import ExportError
from rankscope_storage.base.schema import dataset_schema


def test_all_columns_of_all_rows_are_exported(shelf):
    shelf.put(
        scalars=[scalar(1, math.nan, labels='{"a":"b"}'), scalar(None, None), scalar(2, math.inf)],
        histograms=[row(kind="k", tensor="t", scheme="log2", counts=[1, 2])],
        runs=[row(state="running", step=None, rank=None, incarnation=None)],
    )
    target, report = shelf.export("parquet")
    with shelf.connect() as connection:
        for dataset in ("scalars", "histograms"):
            stored = connection.query(f"SELECT * FROM {dataset}").cast(dataset_schema(dataset))
            written = pq.read_table(target / f"{dataset}.parquet")

            assert dataset_schema(dataset).equals(written.schema)
            assert sorted(map(repr, stored.to_pylist())) == sorted(map(repr, written.to_pylist()))
    assert {"scalars": 3, "histograms": 1, "runs": 1} == report.rows
    assert {"scalars.parquet", "histograms.parquet", "runs.parquet"} == {path.name for path in target.iterdir()}
    assert b"1" == pq.read_schema(target / "runs.parquet").metadata[b"rankscope_schema"]


def test_selection_restricts_measurements_but_not_dimensions(shelf):
    shelf.put(
        scalars=[scalar(step, 1.0, rank=rank) for step in range(5) for rank in (0, 1)],
        runs=[row(state="running", step=None, rank=None, incarnation=None)],
    )
    _, report = shelf.export("parquet", steps=(1, 2), ranks=(1,))

    assert {"scalars": 2, "runs": 1} == report.rows
    with pytest.raises(ExportError, match="is not empty"):  # files of two exports are not mixed
        shelf.export("parquet")


def test_progress_reaches_the_total(shelf):
    shelf.put(scalars=[scalar(step, 1.0) for step in range(9)], tensor_stats=[tensor(1)])
    for form in ("parquet", "tensorboard", "openmetrics"):
        seen = []
        shelf.export(form, form, lambda done, total, seen=seen: seen.append((done, total)))

        assert (10, 10) == seen[-1], form


def test_nan_is_found_by_a_reader_of_footer_statistics(shelf):
    shelf.put(scalars=[scalar(step, value) for step, value in enumerate([1.0, math.nan, 2.0])])
    target, _ = shelf.export("parquet")
    with duckdb.connect() as connection:
        found = connection.sql(f"SELECT step FROM '{target}/scalars.parquet' WHERE isnan(value)").fetchall()

    assert [(1,)] == found
