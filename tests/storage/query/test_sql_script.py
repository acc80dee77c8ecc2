"""The script for the `duckdb` program, executed by DuckDB; its list of files is compared with that of delta-rs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from tests.properties import few
from tests.storage.rows import ask, entries, files

from rankscope_contract.model.schema import DATASETS
from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect
from rankscope_storage.maintenance import compaction
from rankscope_storage.query.sql_script import FILE_NAME, emit_views


def plain(script: str) -> duckdb.DuckDBPyConnection:
    database = duckdb.connect()
    database.execute(script)
    return database


COUNT = "SELECT count(*) FROM scalars"


def assert_same_files(root: Path) -> None:
    found = ask(plain(emit_views(root)), "SELECT dataset, file FROM rankscope_files ORDER BY ALL")

    assert sorted((file["dataset"], f"{root}/{file['path']}") for file in files(root).to_pylist()) == found


def test_script_of_an_empty_store_has_all_views_without_rows(store):
    database = plain((store.root / FILE_NAME).read_text())
    with connect(store.root) as connection:
        for dataset in (*DATASETS, "tensor_global"):
            own, other = connection.sql(f"FROM {dataset}"), database.sql(f"FROM {dataset}")
            assert (own.columns, own.types, []) == (other.columns, other.types, other.fetchall())


@pytest.mark.parametrize(
    "run", few(2, ['it\'s "q"', "a\nb", "", "%41", "..", "r", "a/b", "a=b", "学习", "123", "2026-11-20"])
)
def test_script_finds_files_with_any_run_name(store, writer, batch, run, monkeypatch):
    monkeypatch.setattr("rankscope_storage.files.sorting.OWN_PART_ROWS", 1)
    writer.append(batch(range(3), run=run))

    assert_same_files(store.root)
    assert [(run, 3)] == ask(plain(emit_views(store.root)), "SELECT run, count(*) FROM scalars GROUP BY run")


def test_script_refuses_an_older_duckdb_with_one_sentence(store):
    """`make test-readers` executes the script in such versions, and in 1.4."""
    for version in ("v1.3.2", "v0.10.3"):
        script = (store.root / FILE_NAME).read_text().replace("version()", f"'{version}'")
        with pytest.raises(duckdb.Error, match=f"rankscope.sql needs DuckDB 1.4 or newer, and this is {version}$"):
            plain(script)


def test_script_in_the_store_has_macros_and_finds_files_appended_later(store, writer, batch):
    script = (store.root / FILE_NAME).read_text()
    database = plain(script)
    writer.append(batch(range(10)))
    database.execute(script)
    question = "WITH c AS (SELECT step, loss FROM loss_curve WHERE run = 'r') SELECT count(*) FROM {}"

    assert [(10,)] == ask(database, COUNT)
    assert [(2,)] == ask(database, question.format("downsample(c, step, step, 5)"))  # only the ends are extremes
    assert [(10,)] == ask(database, question.format("ema(c, step, loss, 0.1)"))


@pytest.mark.usual(2)
@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("appends", few(2, [1, 20, 19, 45]))
def test_script_lists_the_same_files_as_delta_rs(store, writer, batch: Callable, appends, clean, monkeypatch):
    """Before, at and after a checkpoint, also with compaction, with and without the entries after the checkpoint."""
    monkeypatch.setattr(compaction, "SMALL_FILES", 6)
    for seq in range(appends):
        writer.append(batch([seq]))
        if seq % 8 == 7:
            writer.compact()
    if clean:
        for entry in entries(store.root):
            os.utime(entry, (1, 1))
        writer.maintain()

    assert_same_files(store.root)
    assert [(appends,)] == ask(plain(emit_views(store.root)), COUNT)


def test_claim_of_a_moved_store_writes_its_script_again(store, writer, batch, tmp_path):
    writer.append(batch(range(3)))
    writer.close()
    moved = store.root.rename(tmp_path / "it's 学")
    Store.open(moved).claim(owner="me").close()

    assert [(3,)] == ask(plain((moved / FILE_NAME).read_text()), COUNT)


READ = """
import duckdb, sys
database = duckdb.connect()
database.execute(open(sys.argv[1]).read())
print(database.sql("SELECT count(*) FROM scalars").fetchall()[0][0])
"""


@pytest.mark.parametrize(("where", "script"), [("", "the copy/rankscope.sql"), ("the copy", "rankscope.sql")])
def test_script_of_a_copied_store_reads_the_copy(store, writer, batch, tmp_path, where, script):
    writer.append(batch(range(3)))
    shutil.copytree(store.root, tmp_path / "the copy")
    writer.append(batch(range(3, 7)))
    command = [sys.executable, "-c", READ, script]
    done = subprocess.run(command, cwd=tmp_path / where, capture_output=True, text=True, check=False)

    assert "3\n" == done.stdout, done.stderr
    assert [(7,)] == ask(plain((store.root / FILE_NAME).read_text()), COUNT)
