"""NaN, Inf, null, the empty string and 0 are told apart in every format."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.errors import CommandError, nearest
from rankscope.output import Format, as_text, cell, write_rows

ROWS = pa.table(
    {
        "value": pa.array([0.0, math.nan, math.inf, -math.inf, None], pa.float64()),
        "text": pa.array(["", 'a "b", c', "line\nbreak", "学习", None]),
        "list": pa.array([[1, 2], [], None, [None], [3]], pa.list_(pa.int64())),
    }
)


def test_json_says_what_json_has_no_word_for():
    rows = json.loads(as_text(ROWS, Format.JSON), parse_constant=lambda word: pytest.fail(f"not JSON: {word}"))

    assert [0.0, "NaN", "Infinity", "-Infinity", None] == [row["value"] for row in rows]
    assert ["", 'a "b", c', "line\nbreak", "学习", None] == [row["text"] for row in rows]
    assert [[1, 2], [], None, [None], [3]] == [row["list"] for row in rows]


def test_json_of_no_rows_is_an_empty_list():
    assert [] == json.loads(as_text(ROWS.slice(0, 0), Format.JSON))


def test_csv_leaves_null_empty_and_quotes_the_empty_string():
    lines = as_text(ROWS.select(["value", "text"]), Format.CSV)

    assert lines.startswith('value,text\n0.0,""\nNaN,"a ""b"", c"\nInfinity,"line\nbreak"\n-Infinity,学习\n,\n')


@given(st.lists(st.tuples(st.one_of(st.none(), st.text()), st.one_of(st.none(), st.integers(-9, 9)))))
def test_csv_is_read_back_by_any_reader(rows):
    texts, numbers = [text for text, _ in rows], [number for _, number in rows]
    table = pa.table({"text": pa.array(texts, pa.string()), "number": pa.array(numbers, pa.int64())})
    read = list(csv.reader(io.StringIO(as_text(table, Format.CSV), newline="")))

    assert [["text", "number"]] == read[:1]
    assert [[text or "", "" if number is None else str(number)] for text, number in rows] == read[1:]


def test_table_shows_every_value_and_counts_what_it_leaves_out():
    text = as_text(ROWS, Format.TABLE, limit=4)

    for word in ("0", "NaN", "Infinity", "-Infinity", "(5 rows, 1 not shown: --rows 5)"):
        assert word in text


def test_table_never_cuts_a_long_value_when_no_person_looks():
    assert "x" * 500 in as_text(pa.table({"text": ["x" * 500]}), Format.TABLE)


def test_markup_and_control_characters_of_a_name_do_nothing():
    text = as_text(pa.table({"tensor": ["[red]w[/red] \x1b[2J"]}), Format.TABLE)

    assert "[red]w[/red]" in text
    assert "\x1b" not in text


def test_parquet_keeps_rows_and_types(tmp_path):
    write_rows(ROWS, Format.PARQUET, tmp_path / "rows.parquet")

    read = pq.read_table(tmp_path / "rows.parquet")
    assert ROWS.schema == read.schema
    assert repr(ROWS.to_pylist()) == repr(read.to_pylist())


def test_output_that_cannot_be_written_is_one_clear_line(tmp_path):
    with pytest.raises(CommandError, match=r"cannot write .*missing"):
        write_rows(ROWS, Format.CSV, tmp_path / "missing" / "rows.csv")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (1234567, "1234567"),
        (1.23456789, "1.23457"),
        (dt.datetime(2026, 3, 1, 12, 0, 0, 5, tzinfo=dt.UTC), "2026-03-01 12:00:00.000005"),
        ({"a": math.nan}, '{"a": "NaN"}'),
    ],
)
def test_cell(value, shown):
    assert shown == cell(value)


def test_nearest_name():
    assert " Did you mean 'my-run'?" == nearest("my-rum", ["other", "my-run"])
    assert "" == nearest("zzz", ["other", "my-run"])
