"""SQLite with the tables of the msprobe monitor, asked by SQLite itself."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path

import pytest
from tests.storage.formats.conftest import row, tensor

from rankscope_storage.base.errors import ExportError
from rankscope_storage.formats.msprobe import sqlite_schema

GOLDEN = Path(__file__).resolve().parents[2] / "data" / "msprobe" / "sqlite_schema_26.2.0.sql"


@pytest.fixture
def ask(shelf):
    """Return a function that exports the run and returns the rows of a question to the database."""

    def export(query, *, name="out.db", **options):
        path, _ = shelf.export("sqlite", name, **options)
        with contextlib.closing(sqlite3.connect(path)) as database:
            return database.execute(query).fetchall()

    return export


def definitions(statements):
    """Return {table: definition} with all blanks alike."""
    alike = [re.sub(r"\s+", " ", statement).strip().rstrip(";") for statement in statements]
    return {re.match(r"CREATE TABLE (\w+)", text)[1]: re.sub(r" ?([(),]) ?", r"\1", text) for text in alike if text}


def test_tables_are_msprobes(shelf, ask):
    shelf.put(tensor_stats=[tensor(1)])
    made = definitions(text for (text,) in ask("SELECT sql FROM sqlite_master WHERE type = 'table'") if text)
    columns = [name for _, name, *_ in ask("PRAGMA table_info(trend_data)")]
    golden = definitions(GOLDEN.read_text(encoding="utf-8").split(";\n"))
    # A slip of the original: a table of that name does not exist, and inserting fails where foreign keys are checked.
    golden["tag_target_mapping"] = golden["tag_target_mapping"].replace("monitoring_target(", "monitoring_targets(")

    for table in ("monitoring_targets", "monitoring_metrics", "monitoring_tags", "tag_target_mapping"):
        assert golden[table] == made[table]
    assert re.findall(r"(\w+) (?:INTEGER NOT NULL|REAL)", golden["trend_data"]) == columns
    assert re.sub(r",(?!m)\w+ TEXT DEFAULT NULL", "", golden["global_stats"]) == made["global_stats"].replace(
        ',"grad_reduced" TEXT DEFAULT NULL', ""
    )


def test_steps_are_partitioned(shelf, ask):
    shelf.put(tensor_stats=[tensor(step, norm=float(step)) for step in (1, 5, 6, 11)])
    tables = ask("SELECT name FROM sqlite_master WHERE name LIKE 'metric_%_step_%' ORDER BY name", step_partition=5)

    assert [(f"metric_1_step_{steps}",) for steps in ("0_4", "10_14", "5_9")] == tables
    assert [(0, 0, 1.0), (0, 4, 5.0)] == ask("SELECT rank, step, norm FROM metric_1_step_0_4", step_partition=5)
    assert [(0, 1.0), (4, 5.0), (5, 6.0), (10, 11.0)] == ask("SELECT step, norm FROM trend_data", step_partition=5)
    assert [(0, 10, 0)] == ask("SELECT min_step, max_step, max_rank FROM global_stats")
    assert [("5",)] == ask("SELECT value FROM export_facts WHERE name = 'step_partition'", step_partition=5)


@pytest.mark.thorough
def test_more_partitions_than_sqlite_allows_in_one_union(shelf, ask):
    shelf.put(tensor_stats=[tensor(step, norm=float(step)) for step in range(1, 1203)])

    assert [(1202, 1202 * 1203 / 2)] == ask("SELECT count(*), sum(norm) FROM trend_data", step_partition=1)
    assert [("ok",)] == ask("PRAGMA integrity_check", name="again.db", step_partition=1)


def test_numbers_are_unchanged(shelf, ask):
    """The tool cuts at 1e9 and turns Inf into a number."""
    shelf.put(
        tensor_stats=[
            tensor(1, "big", norm=2e12, nans=0, infs=0),
            tensor(1, "inf", nans=0, infs=3),
            tensor(1, "nan", nans=7, infs=0),
            tensor(1, "zeros", zeros=1, numel=3, nans=0, infs=0),
        ]
    )
    query = "SELECT target_name, norm, nans, zeros FROM trend_data JOIN monitoring_targets USING (target_id) ORDER BY 1"

    assert [
        ("big", 2e12, 0.0, None),
        ("inf", float("inf"), 0.0, None),
        ("nan", None, 7.0, None),
        ("zeros", 1.5, 0.0, 1 / 3),
    ] == ask(query)


def test_stage_and_micro_step_distinguish_targets(shelf, ask):
    pairs = [(stage, micro) for stage in (0, 1) for micro in (0, 1)]
    shelf.put(
        tensor_stats=[tensor(1, "layers.3.fc", "act_in", vpp_stage=one, micro_step=other) for one, other in pairs]
    )
    targets = ask("SELECT target_name, vpp_stage, micro_step FROM monitoring_targets ORDER BY 2, 3")
    tags = ask("SELECT tag_name, category FROM monitoring_tags ORDER BY tag_name")

    assert [("layers.3.fc.input", *pair) for pair in pairs] == targets
    assert [("fc", "module"), ("input", "module"), ("layers", "module"), ("layers.3", "layer")] == tags
    assert [(16,)] == ask("SELECT count(*) FROM tag_target_mapping")


def test_each_feature_family_has_its_own_columns(shelf, ask):
    shelf.put(features=[row(kind="stable_rank", module="fc", value=2.0)])

    assert [("linear_hook", "sr,kernel_norm")] == ask(
        "SELECT metric_name, group_concat(stat_name) FROM monitoring_metrics JOIN "
        "(SELECT * FROM metric_stats ORDER BY stat_name DESC) USING (metric_id) GROUP BY 1"
    )
    assert [(2.0, None)] == ask("SELECT sr, kernel_norm FROM metric_1_step_0_499")


def test_latest_attempt_of_a_step_counts(shelf, ask):
    for attempt, steps in ((0, (1, 2, 3)), (1, (3, 4))):
        shelf.put(tensor_stats=[tensor(step, norm=float(attempt), attempt=attempt) for step in steps])

    assert [(0, 0.0), (1, 0.0), (2, 1.0), (3, 1.0)] == ask("SELECT step, norm FROM trend_data ORDER BY step")
    assert [(0, 0.0), (1, 0.0), (2, 0.0)] == ask("SELECT step, norm FROM trend_data ORDER BY step", attempt=0)


def test_export_is_replaced_and_other_files_are_kept(shelf):
    shelf.put(tensor_stats=[tensor(1)])
    _, first = shelf.export("sqlite", "out.db")
    _, second = shelf.export("sqlite", "out.db")
    other = shelf.folder / "mine.db"
    other.write_text("precious")

    assert first.rows == second.rows == {"tensor_stats": 1}
    with pytest.raises(ExportError, match="is not an export of Rankscope: choose another name"):
        shelf.export("sqlite", "mine.db")
    with pytest.raises(ExportError, match="cannot write"):
        shelf.export("sqlite", "mine.db/out.db")
    assert "precious" == other.read_text()
    assert not list(shelf.folder.glob(".*"))


def test_tags_are_words_and_layers():
    assert {("weight", "module")} == sqlite_schema.tags("0.weight")
    assert {("a", "module"), ("a.1", "layer"), ("b", "module")} == sqlite_schema.tags("a.1.2.b")
