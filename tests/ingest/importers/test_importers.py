"""Foreign logs become rows; what cannot be read is counted with its line, and nothing is stored twice."""

from __future__ import annotations

import pytest

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import find_importer, import_records, importers
from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect


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
        find_importer(write(tmp_path, "nothing of any training\n", "train.log"))
    with pytest.raises(IngestError, match="cannot be read"):
        find_importer(tmp_path / "absent")


def test_importers_are_found_by_their_files():
    assert "jsonl" in importers()
