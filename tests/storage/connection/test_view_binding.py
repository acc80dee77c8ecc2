"""Analysed statements are faster and return the same rows."""

from __future__ import annotations

import itertools
import math
import random

import pyarrow as pa
import pytest
from tests.properties import few

from rankscope_storage.api.store import Batch
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.connection.view_binding import BUCKETS, CURVE, LATEST, LOSS
from rankscope_storage.query import file_facts

ASKED = {
    LATEST: LATEST,
    CURVE: "scalar_curve('r', points := 7)",
    LOSS: "(FROM loss_curve WHERE run = 'r')",
    BUCKETS: "bucket_deviations('r', width := 10)",
}


def append(writer, dataset: str, rows: list[dict]) -> None:
    usual = {"tensor_stats": {"kind": "grad_reduced", "tensor": "w"}, "scalars": {"name": "loss", "value": 1.0}}
    usual["scalar_rollups"] = {"name": "loss", "rows": 9, "value_count": 9, "value_avg": 2.0, "value_nans": 0}
    filled = [{"run": "r", "attempt": 0} | usual[dataset] | row for row in rows]
    table = pa.Table.from_pylist(filled, schema=dataset_schema(dataset))
    writer.append(Batch(tables={dataset: table}, watermarks={}))


@pytest.mark.parametrize("seed", few(1, range(6)))
def test_analysed_and_general_views_return_equal_rows(writer, connection, seed):
    draw, ordinals = random.Random(seed), itertools.count()
    for number in range(4):
        runs = ["r", "s"][: draw.choice([1, 2])]
        shape = {"attempt": draw.choice([0, 0, number]), "micro_step": draw.choice([None, None, 1])}
        steps = [
            {"run": draw.choice(runs), "rank": rank, "step": step, **shape}
            for rank in range(2)
            for step in range(20 * number, 20 * number + draw.choice([1, 30]))
        ]
        append(writer, "tensor_stats", [row | {"norm": draw.choice([1.0, 2.5, math.inf, None])} for row in steps])
        del shape["micro_step"]
        values = [{"value": draw.choice([1.0, math.nan, None]), "ordinal": next(ordinals)} for _ in steps]
        append(writer, "scalars", [row | value for row, value in zip(steps, values, strict=True)])
        if draw.random() < 0.3:
            append(writer, "scalar_rollups", [{"first_step": -50, "last_step": -1, "step": -50, **shape}])
        for name, asked in ASKED.items():
            in_a_text = asked.replace("'", "''")
            plain = connection.sql(f"FROM query('FROM {in_a_text}') ORDER BY ALL")
            sooner = connection.sql(f"FROM {asked} ORDER BY ALL")

            assert repr(plain.fetchall()) == repr(sooner.fetchall()), (name, number)
            assert (plain.columns, plain.types) == (sooner.columns, sooner.types)


@pytest.mark.parametrize("statement", ["SHOW TABLES", "SELECT count(*) FROM duckdb_views()", "DESCRIBE scalars"])
def test_statements_that_list_views_read_no_rows(writer, connection, monkeypatch, statement):
    append(writer, "tensor_stats", [{"rank": 0, "step": 1}])
    looked = []
    monkeypatch.setattr(file_facts.FileFact, "of", lambda *arguments: looked.append(arguments))
    with connect(connection.path) as fresh:
        assert fresh.sql(statement).fetchall()

    assert [] == looked
