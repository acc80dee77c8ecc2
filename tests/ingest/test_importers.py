"""Foreign logs become rows; what cannot be read is counted with its line, and nothing is stored twice."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope_ingest.errors import IngestError
from rankscope_ingest.importers import Faults, find_importer, import_records, importers
from rankscope_ingest.importers.jsonl import JsonLines
from rankscope_storage.connection import connect
from rankscope_storage.store import Store

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "jsonl"


@pytest.fixture
def bring(tmp_path):
    """Return a function that imports a file into one store, and one that asks it."""
    with Store.open(tmp_path / "store", create=True).claim(owner="test") as writer:

        def bring_in(path, run="r"):
            return import_records(path, writer, find_importer(path), run=run)

        def ask(query):
            with connect(tmp_path / "store") as connection:
                return connection.query(query).to_pylist()

        yield bring_in, ask


def write(tmp_path, text, name="log.jsonl"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_numbers_become_scalars_and_what_is_no_number_does_not(tmp_path, bring):
    bring_in, ask = bring
    lines = [
        {"step": 1, "loss": 2.5, "lr": 1, "note": "warm-up", "ok": True, "nested": {"a": 1}, "list": [1]},
        {"step": 2, "loss": None},
        {"global_step": 3.0, "loss": math.nan, "grad_norm": math.inf},
        {"loss": -math.inf, "timestamp": "2026-02-19T20:20:12.264373+00:00", "rank": 3},
    ]
    report = bring_in(write(tmp_path, "\n".join(map(json.dumps, lines))))
    rows = ask("SELECT seq, step, rank, name, value FROM scalars ORDER BY seq, name")

    assert [
        (0, 1, None, "loss", "2.5"),
        (0, 1, None, "lr", "1.0"),
        (2, 3, None, "grad_norm", "inf"),
        (2, 3, None, "loss", "nan"),
        (3, None, 3, "loss", "-inf"),
    ] == [(r["seq"], r["step"], r["rank"], r["name"], repr(r["value"])) for r in rows]
    assert (4, 5, 3, 0) == (report.records, report.rows_stored, report.last_step, report.malformed)
    assert [{"n": 1}] == ask("SELECT count(*) AS n FROM scalars WHERE ts = '2026-02-19 20:20:12.264373+00'")
    assert [{"state": "stopped", "source_kind": "jsonl", "last_step": 3}] == ask(
        "SELECT state, source_kind, last_step FROM runs"
    )


def test_lines_that_are_no_objects_are_counted_with_their_numbers(tmp_path, bring):
    bring_in, _ = bring
    text = b'{"step": 1, "loss": 1}\nEpoch 1 done\n\n[1, 2]\r\n{"step": 2, "loss": 2}\r\n\xff\xfe\n{"step": 3, "lo'
    report = bring_in(write(tmp_path, text))

    assert (2, [2, 4, 6, 7]) == (report.records, [fault.line for fault in report.faults])
    assert "Epoch 1 done" in report.faults[0].text


def test_a_file_that_grew_brings_only_what_is_new(tmp_path, bring):
    """Also when its last line was caught in the middle of being written."""
    bring_in, ask = bring
    path = write(tmp_path, '{"step": 1, "loss": 1}\n{"step": 2, "lo')
    first = bring_in(path)
    path.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n{"step": 3, "loss": 3}\n')
    second, third = bring_in(path), bring_in(path)

    assert [1, 2, 0] == [first.rows_stored, second.rows_stored, third.rows_stored]
    assert [1, 2, 3] == [row["step"] for row in ask("SELECT step FROM scalars ORDER BY seq")]


def test_same_file_as_another_run_is_another_history(tmp_path, bring):
    bring_in, ask = bring
    path = write(tmp_path, '{"step": 1, "loss": 1}\n')
    bring_in(path, run="a")
    bring_in(path, run="b")

    assert [{"run": "a"}, {"run": "b"}] == ask("SELECT run FROM scalars ORDER BY run")


def test_format_nobody_knows_is_told_with_the_known_ones(tmp_path):
    with pytest.raises(IngestError, match=r"in no known format; known are .*jsonl"):
        find_importer(write(tmp_path, "iteration 1/100 | lm loss 1.0\n", "train.log"))
    with pytest.raises(IngestError, match="cannot be read"):
        find_importer(tmp_path / "absent")


def test_importers_are_found_by_their_files():
    assert "jsonl" in importers()


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.text(max_size=5),
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            max_size=4,
        ),
        max_size=8,
    )
)
def test_every_printed_number_comes_back(tmp_path_factory, documents):
    path = write(tmp_path_factory.mktemp("jsonl"), "\n".join(map(json.dumps, documents)))
    faults = Faults()
    found = [{row["name"]: row["value"] for row in record.rows["scalars"]} for record in JsonLines().read(path, faults)]
    reserved = {"step", "global_step", "iteration", "iter", "current_steps", "rank", "timestamp"}
    expected = [
        {
            name: float(value)
            for name, value in document.items()
            if name not in reserved and isinstance(value, int | float) and not isinstance(value, bool)
        }
        for document in documents
    ]

    assert (0, repr(expected)) == (faults.count, repr(found))


@pytest.mark.skipif(not DATA.is_dir(), reason="recorded logs are not here")
@pytest.mark.parametrize("path", sorted(DATA.glob("*.jsonl")) if DATA.is_dir() else [], ids=lambda path: path.stem)
def test_recorded_logs_are_read_whole(path):
    """Against a count made by nothing but the json module."""
    faults = Faults()
    records = list(JsonLines().read(path, faults))
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]

    assert len(lines) == len(records) + faults.count
    assert len(records) >= 1
