"""Every output format distinguishes NaN, Inf, null, the empty string and 0."""

import csv
import dataclasses
import datetime as dt
import io
import json
import math

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from rankscope.commands import build
from rankscope.output.rows import as_text, cell, distinct_names, write_rows
from rankscope.output.run_texts import anomaly_table
from rankscope_storage.api.summaries import AnomalyRow

ROWS = pa.table(
    {
        "value": pa.array([0.0, math.nan, math.inf, -math.inf, None], pa.float64()),
        "text": pa.array(["", 'a "b", c', "line\nbreak", "学习", None]),
        "list": pa.array([[1, 2], [], None, [None], [3]], pa.list_(pa.int64())),
    }
)


def test_json_writes_nan_and_inf_as_strings():
    rows = json.loads(as_text(ROWS, "json"), parse_constant=lambda word: pytest.fail(f"not JSON: {word}"))

    assert [0.0, "NaN", "Infinity", "-Infinity", None] == [row["value"] for row in rows]
    assert ["", 'a "b", c', "line\nbreak", "学习", None] == [row["text"] for row in rows]
    assert [[1, 2], [], None, [None], [3]] == [row["list"] for row in rows]
    assert [] == json.loads(as_text(ROWS.slice(0, 0), "json"))


def test_csv_writes_null_empty_and_quotes_the_empty_string():
    lines = as_text(ROWS.select(["value", "text"]), "csv")

    assert lines.startswith('value,text\n0.0,""\nNaN,"a ""b"", c"\nInfinity,"line\nbreak"\n-Infinity,学习\n,\n')


@given(st.lists(st.tuples(st.one_of(st.none(), st.text()), st.one_of(st.none(), st.integers(-9, 9)))))
def test_csv_can_be_read_by_the_csv_module(rows):
    texts, numbers = [text for text, _ in rows], [number for _, number in rows]
    table = pa.table({"text": pa.array(texts, pa.string()), "number": pa.array(numbers, pa.int64())})
    read = list(csv.reader(io.StringIO(as_text(table, "csv"), newline="")))

    assert [["text", "number"]] == read[:1]
    assert [[text or "", "" if number is None else str(number)] for text, number in rows] == read[1:]


def test_table_shows_every_value_and_counts_hidden_rows():
    text = as_text(ROWS, "table", limit=4)

    for word in ("0", "NaN", "Infinity", "-Infinity", "(5 rows, 1 not shown: --rows 5)"):
        assert word in text


def test_table_in_a_file_has_whole_values_without_control_characters():
    text = as_text(pa.table({"tensor": ["[red]w[/red] \x1b[2J" + "x" * 500]}), "table")

    assert "[red]w[/red]" in text
    assert "x" * 500 in text
    assert "\x1b" not in text


def test_parquet_preserves_rows_and_types(tmp_path):
    write_rows(ROWS, "parquet", tmp_path / "rows.parquet")
    read = pq.read_table(tmp_path / "rows.parquet")

    assert ROWS.schema == read.schema
    assert repr(ROWS.to_pylist()) == repr(read.to_pylist())


def test_columns_with_equal_names_keep_their_values(tmp_path):
    """A join can return a name twice; CSV and tables repeat it, JSON and Parquet append a number."""
    rows = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "a", "a_1"])
    write_rows(rows, "parquet", tmp_path / "rows.parquet")

    assert "a,a,a_1\n1,2,3\n" == as_text(rows, "csv")
    assert [{"a": 1, "a_2": 2, "a_1": 3}] == json.loads(as_text(rows, "json"))
    assert [{"a": 1, "a_2": 2, "a_1": 3}] == pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert ["1", "2", "3"] == as_text(rows, "table").splitlines()[2].split()


@given(st.lists(st.sampled_from(["a", "a_1", "a_2", "b", ""])))
def test_distinct_names_renames_only_repeated_names(names):
    found = distinct_names(names)

    assert len(names) == len(set(found))
    assert all(name in found for name in names)


def test_times_out_of_range_are_shown_with_all_other_values():
    times = pa.array([0, 2**63 - 1, -(2**63 - 1), 2**62, None], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    shown = ["1970-01-01 00:00:00+00", "infinity", "-infinity", "148108-07-06 14:00:27.387904+00", None]
    dates = pa.array([0, 2**31 - 1], pa.int32()).cast(pa.date32())

    assert shown == [row["ts"] for row in json.loads(as_text(pa.table({"ts": times}), "json"))]
    assert "d\n1970-01-01\ninfinity\n" == as_text(pa.table({"d": dates}), "csv")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((None, "null"), (True, "true"), (1234567, "1234567"), (1.23456789, "1.23457")),
        (dt.datetime(2026, 3, 1, 12, 0, 0, 5, tzinfo=dt.UTC), "2026-03-01 12:00:00.000005"),
        ({"a": math.nan}, '{"a": "NaN"}'),
    ],
)
def test_cell_text_of_each_type(value, shown):
    assert shown == cell(value)


@pytest.mark.parametrize(("form", "start"), [("csv", "attempt,rank,step,"), ("json", "[\n")])
def test_an_anomaly_of_no_single_rank_has_no_number(form, start):
    nothing = dict.fromkeys(field.name for field in dataclasses.fields(AnomalyRow))
    row = AnomalyRow(**{**nothing, "step": 5, "rule": "ReplicaDesync"})
    text = as_text(anomaly_table([row]), form)

    assert text.startswith(start)
    assert form == "json" or text.splitlines()[1].startswith(",,5,")
    assert form == "csv" or None is json.loads(text)[0]["rank"]


def test_an_interval_of_a_query_is_readable_in_each_format(tmp_path):
    took = "timestamp '2026-03-02 13:00:00' - timestamp '2026-03-01 12:00:00'"
    query = f"select {took} as took, [{took}] as list union all select null, null"
    rows = duckdb.sql(query).to_arrow_table()
    write_rows(rows, "parquet", tmp_path / "rows.parquet")

    assert all("1 day 01:00:00" in as_text(rows, form) for form in ("table", "csv", "json"))
    assert {"1 day 01:00:00", None} == {*pq.read_table(tmp_path / "rows.parquet")["took"].to_pylist()}


def test_a_struct_with_a_field_named_interval_remains_an_object():
    rows = duckdb.sql("select {'interval': 5, 'steps': [1, 2]} as s").to_arrow_table()

    assert [{"s": {"interval": 5, "steps": [1, 2]}}] == json.loads(as_text(rows, "json"))


# `-` as the output of a command is standard output. A command that writes a folder refuses it.


FILES = {  # The arguments of each command that writes a file, and the first bytes of the file
    "anomalies": (["my-run"], "step"),
    "compare": (["my-run", "../other run"], "\N{REPLACEMENT CHARACTER}PNG"),
    "export": (["my-run", "--format", "sqlite"], "SQLite format 3"),
    "incidents": (["my-run"], "n   state"),
    "plot": (["my-run"], "\N{REPLACEMENT CHARACTER}PNG"),
    "report": (["my-run"], "<!DOCTYPE html>"),
    "runs": (["list"], "run"),
    "sql": (["select 1 as one", "--format", "parquet"], "PAR1"),
    "store": (["stats", "--format", "csv"], "dataset"),
}

FOLDERS = {"dashboards provision --into", "msprobe anomaly --out-path"}
FOLDERS |= {"msprobe csv2tensorboard --output-dirpath", "msprobe csv2db --output-dirpath"}


def options():
    """Yield the path of each command, with the longest spelling of each option that names an output."""
    pending = [("", typer.main.get_command(build()))]
    while pending:
        path, command = pending.pop()
        pending += [(f"{path} {name}".strip(), each) for name, each in getattr(command, "commands", {}).items()]
        for parameter in command.params:
            if (parameter.name or "").startswith(("output", "out_", "into")):
                yield path, max(parameter.opts, key=len)


def test_each_command_with_an_output_is_in_one_of_the_lists():
    outputs = {(command, option) for command, option in options() if option != "--outputs"}

    assert {(command, "--output") for command in FILES} == {each for each in outputs if each[1] == "--output"}
    assert {" ".join(each) for each in outputs if each[1] != "--output"} == FOLDERS


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[pytest.mark.thorough] * (name == "compare")) for name in sorted(FILES)]
)
def test_output_of_a_command_is_standard_output(rankscope, tmp_path, command):
    arguments, head = FILES[command]
    done = rankscope(command, *arguments, "--output", "-", cwd=tmp_path)

    assert 0 == done.returncode, done.stderr
    assert head == done.stdout[: len(head)]
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("option", sorted([*FOLDERS, "export --output", "import --store"]))
def test_a_folder_is_not_standard_output(rankscope, tmp_path, option):
    *command, name = option.split()
    needed = {"import": ["log.jsonl"], "msprobe": ["--monitor-path", "."], "export": ["--format", "csv"]}
    given = ["--data-path", "."] if command[-1] == "anomaly" else needed.get(command[0], [])
    done = rankscope(*command, *given, name, "-", cwd=tmp_path)

    assert 2 == done.returncode, done.stderr
    assert "folder" in done.stderr
    assert [] == list(tmp_path.iterdir())
