"""Tests that logs of other programs become rows, unreadable lines are counted, and no row is stored twice."""

from __future__ import annotations

import pytest

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import Options, find_importer, import_records, importers, replaceable
from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect


@pytest.fixture
def import_log(tmp_path):
    """Return a function that imports a file into a store, and one that queries the store."""
    with Store.open(tmp_path / "store", create=True).claim(owner="test") as writer:

        def bring_in(path, run="r"):
            return import_records(path, writer, find_importer(path), run=run)

        def query(sql):
            with connect(tmp_path / "store") as connection:
                return connection.query(sql).to_pylist()

        yield bring_in, query


def write(tmp_path, text, name="log.jsonl"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_grown_jsonl_file_adds_only_new_rows(tmp_path, import_log):
    """This holds also if the last line was incomplete at the first import."""
    bring_in, query = import_log
    path = write(tmp_path, '{"step": 1, "loss": 1}\n{"step": 2, "lo')
    first = bring_in(path)
    path.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n{"step": 3, "loss": 3}\n')
    second, third = bring_in(path), bring_in(path)

    assert [1, 2, 0] == [first.rows_stored, second.rows_stored, third.rows_stored]
    assert [1, 2, 3] == [row["step"] for row in query("SELECT step FROM scalars ORDER BY seq")]


@pytest.mark.parametrize("name", ["megatron", "msprobe", "openmetrics", "tensorboard", "trainer_state"])
def test_choice_of_the_loss_in_another_format_is_an_error(tmp_path, name):
    path = write(tmp_path, '{"step": 1, "loss": 1}\n')
    importer = importers()[name]

    with pytest.raises(IngestError, match="--loss does not apply"):
        import_records(path, None, importer, run="r", options=Options(loss="avr_loss"))
    with pytest.raises(IngestError, match="--loss does not apply"):
        replaceable(path, "r", importer, [], None, is_live=False, options=Options(loss="avr_loss"))


def test_same_file_may_be_imported_as_two_runs(tmp_path, import_log):
    bring_in, query = import_log
    path = write(tmp_path, '{"step": 1, "loss": 1}\n')
    bring_in(path, run="a")
    bring_in(path, run="b")

    assert [{"run": "a"}, {"run": "b"}] == query("SELECT run FROM scalars ORDER BY run")


def test_error_for_an_unknown_format_names_the_known_formats(tmp_path):
    with pytest.raises(IngestError, match=r"unknown format; known formats: .*jsonl"):
        find_importer(write(tmp_path, "nothing of any training\n", "train.log"))
    with pytest.raises(IngestError, match="cannot be read"):
        find_importer(tmp_path / "absent")


def test_importers_are_discovered_by_their_modules():
    assert "jsonl" in importers()
