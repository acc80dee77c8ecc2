"""Tests of large logs with one object per line, and of every number in them; `cases` has the dialects."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import Faults, ImportedBlock, find_importer
from rankscope_ingest.importers.jsonl import JsonLines


def losses(logs):
    return [tuple(row.values()) for row in logs.query("SELECT step, value FROM scalars ORDER BY seq, name")]


@pytest.mark.parametrize("end", ["\n", ""])
def test_line_of_many_megabytes_is_skipped_and_counted(logs, end):
    body = b'{"step": 1, "loss": 1}\n{"step": 2, "x": "' + b"y" * (17 << 20) + b'"}\n{"step": 3, "loss": 3}'
    report = logs.import_log(logs.write("log.jsonl", body + end.encode()))

    assert [(1, 1.0), (3, 3.0)] == losses(logs)
    assert [2] == [fault.line for fault in report.faults]


def test_row_behind_megabytes_of_nul_bytes_is_read(logs):
    text = '{"step": 1, "loss": 1.0}\n{"step": 2, "lo' + "\0" * (20 << 20) + '{"step": 3, "loss": 3}\n'
    logs.import_log(logs.write("log.jsonl", text))

    assert [(1, 1.0), (3, 3.0)] == losses(logs)


def test_source_code_with_braces_is_not_detected(logs):
    code = "import json\n\ndef nothing():\n    return {}\n\nprint(f'{nothing()}', {'a': 1})\n"
    with pytest.raises(IngestError, match="unknown format"):
        find_importer(logs.write("program.py", code))


def test_file_without_line_feeds_may_be_longer_than_a_line(logs):
    logs.import_log(logs.write("a.jsonl", "".join(f'{{"step": {step}, "loss": 1.0}}\r' for step in range(3000))))

    assert 3000 == logs.value("SELECT count(*) FROM scalars")


def test_lines_longer_than_the_detection_window_are_recognized(logs):
    lines = [json.dumps({"step": step, "loss": 1, "note": "x" * 100_000}) for step in range(3)]
    report = logs.import_log(logs.write("log.jsonl", "\n".join(["launching", *lines, ""])))

    assert ("jsonl", 3) == (report.source_kind, report.records)


def test_number_of_thousands_of_digits_is_infinite(logs):
    logs.import_log(logs.write("log.jsonl", '{"step": 1, "loss": ' + "9" * 5000 + "}\n"))

    assert [(1, float("inf"))] == losses(logs)


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.text(max_size=5).map(lambda name: f"my_{name}"),
            st.none() | st.booleans() | st.integers() | st.floats(),
            min_size=1,
            max_size=4,
        ),
        max_size=8,
    ),
    st.sampled_from([json.dumps, repr]),
)
def test_every_printed_number_is_restored(tmp_path_factory, documents, spelled):
    """The number is printed as JSON and as Python prints it."""
    path = tmp_path_factory.getbasetemp() / "log.jsonl"
    path.write_text("\n".join(map(spelled, documents)), encoding="utf-8")
    faults = Faults()
    found = [[] for _ in documents]
    for block in JsonLines().read(path, faults):
        if isinstance(block, ImportedBlock) and "scalars" in block.tables:
            for row in block.tables["scalars"].to_pylist():
                found[row["record"]].append((row["name"], repr(row["value"])))
    numbers = [
        [(name, value) for name, value in document.items() if type(value) in {int, float}] for document in documents
    ]

    assert (0, [[(name, repr(float(value))) for name, value in row] for row in numbers]) == (faults.count, found)
