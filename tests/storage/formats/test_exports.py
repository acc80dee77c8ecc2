"""Exports as Parquet, SQLite and OpenMetrics, asked by real readers; options are checked before anything is written."""

import contextlib
import datetime as dt
import math
import re
import sqlite3
import subprocess
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tests.storage.formats.conftest import START, row, scalar, tensor

from rankscope_contract.model.kinds import Kind
from rankscope_msprobe.files.csv_layout import FAMILY_OF
from rankscope_storage.base.errors import ExportError
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.formats import ExportOptions, sqlite_schema
from rankscope_storage.formats.export import parse_time

AT_NOON = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"time_start": AT_NOON, "time_end": AT_NOON - dt.timedelta(1)}, "exchange them"),
        ({"time_start": AT_NOON.replace(tzinfo=None)}, "has no time zone"),
        *(({"steps": (2, 1)}, "end before they begin"), ({"time_zone": "Berlin"}, "time_zone 'Berlin' is unknown")),
        ({"step_count_per_record": 0}, "must be 1 to 1,000,000"),
        ({"process_num": 0}, "process_num must be 1 or more"),
        *(({"step_partition": 0}, "step_partition must be 1 or more"), ({"seed_rounding": 18}, "number of decimals")),
        ({"data_type_list": ("actv", "wg")}, "there is no data type 'wg'; data types are act_grad_in"),
    ],
)
def test_invalid_options_are_rejected_with_the_fix(options, said):
    with pytest.raises(ExportError, match=said):
        ExportOptions(**options)


def test_data_types_are_families_or_kinds():
    assert set(Kind) == set(FAMILY_OF)
    assert {"act_in", "act_out", "momentum"} == ExportOptions(data_type_list=("actv", "momentum")).kinds()
    assert ExportOptions().kinds() is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("2026-03-01T12:00:00+01:00", dt.datetime(2026, 3, 1, 11, tzinfo=dt.UTC)), ("2026-03-01 12:00", AT_NOON)),
        *(("2026-03-01", AT_NOON.replace(hour=0)), ("Mar01_12-00-00", AT_NOON)),
        ("Dec31_23-59-59", dt.datetime(2025, 12, 31, 23, 59, 59, tzinfo=dt.UTC)),  # closer than that of 2026
        ("Feb29_00-00-00", dt.datetime(2028, 2, 29, tzinfo=dt.UTC)),  # a day closer than that of 2024
    ],
)
def test_times_are_iso_or_msprobe_folder_times(text, expected):
    """`time_start="Dec03_21-34-40"` of the existing tool has no year: the closest is meant."""
    assert expected == parse_time(text, AT_NOON)


@pytest.mark.parametrize("text", ["yesterday", "Feb30_00-00-00", "Foo01_00-00-00", "", "Dec03"])
def test_invalid_time_is_rejected(text):
    with pytest.raises(ExportError, match="is not a time"):
        parse_time(text, AT_NOON)


# Parquet files with every column, as any reader of Parquet sees them.


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


# SQLite with the tables of the msprobe monitor, asked by SQLite itself.

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
        *(("big", 2e12, 0.0, None), ("inf", float("inf"), 0.0, None), ("nan", None, 7.0, None)),
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


# OpenMetrics text, read by the strict parser of prometheus_client and by the real promtool.


def samples(target):
    """Return {(name, labels without the usual): [(time, value)]} as a strict reader has them."""
    found = {}
    for family in text_string_to_metric_families(target.read_text(encoding="utf-8")):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in {"run", "job", "instance"}}
            moment = sample.timestamp.sec + sample.timestamp.nsec / 1e9
            found.setdefault((sample.name, tuple(sorted(labels.items()))), []).append((moment, float(sample.value)))
    return found


NOON = START.timestamp()


def test_history_has_the_names_and_labels_of_live_data(shelf):
    shelf.put(
        scalars=[
            *(scalar(1, 2.5), scalar(2, 2.25), scalar(2, 0.5, "accuracy")),
            scalar(2, 0.1, "learning_rate", labels='{"group":"a"}'),
            scalar(2, 512.0, "tokens_total", unit="tokens"),
        ],
        tensor_stats=[tensor(2, norm=1.5, nans=0, norm_baseline=1.25)],
    )
    target, report = shelf.export("openmetrics")
    found = samples(target)
    rank, kind = ("rank", "0"), ("kind", "grad_reduced")
    of_tensor = (kind, ("op", "norm"), rank, ("tensor", "w"))
    expected = {
        ("rankscope_loss", (rank,)): [(NOON + 1, 2.5), (NOON + 2, 2.25)],
        ("rankscope_learning_rate", (("group", "a"), rank)): [(NOON + 2, 0.1)],
        ("rankscope_tokens_total", (rank,)): [(NOON + 2, 512.0)],
        ("rankscope_scalar", (("name", "accuracy"), rank)): [(NOON + 2, 0.5)],
        ("rankscope_tensor_value", of_tensor): [(NOON + 2, 1.5)],
        ("rankscope_tensor_baseline", of_tensor): [(NOON + 2, 1.25)],
        ("rankscope_step", (rank,)): [(NOON + 1, 1.0), (NOON + 2, 2.0)],
        ("rankscope_kind_step", (kind, rank)): [(NOON + 2, 2.0)],
    }

    assert expected.items() <= found.items()
    assert 'rankscope_loss{instance="r/0",job="rankscope",run="r",rank="0"} 2.5 1772366401\n' in target.read_text()
    assert {"tensor_stats": 1, "scalars": 5, "samples": 0} == report.rows


def test_openmetrics_format_is_valid(shelf):
    """Families in one piece with their TYPE first, a UNIT only where the name ends in it, `# EOF` last."""
    shelf.put(scalars=[scalar(step, 1.0, name) for step in (1, 2) for name in ("step_seconds", "tokens_total", "loss")])
    target, _ = shelf.export("openmetrics")
    text = target.read_text(encoding="utf-8")
    heads = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)

    assert text.endswith("\n# EOF\n")
    assert len(heads) == len(set(heads))
    assert "# TYPE rankscope_tokens counter\n# UNIT rankscope_tokens tokens\n" in text
    assert "# TYPE rankscope_step gauge\n# HELP" in text
    assert "# UNIT rankscope_step_seconds seconds\n" in text


def test_names_are_escaped_and_all_numbers_are_exported(shelf):
    odd = 'a"b\\c\nd{}, 学=1'
    values = [math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308, 0.1]
    shelf.put(scalars=[scalar(step, value, odd, run=odd) for step, value in enumerate(values, 1)])
    target, _ = shelf.export("openmetrics", run=odd)
    found = samples(target)

    assert repr(values) == repr([value for _, value in found["rankscope_scalar", (("name", odd), ("rank", "0"))]])
    assert "NaN" in target.read_text()
    assert " +Inf " in target.read_text()


def test_steps_within_one_second_get_successive_milliseconds(shelf):
    """A log has times in whole seconds; Prometheus keeps one sample per millisecond and series."""
    later = START + dt.timedelta(milliseconds=1, microseconds=500)
    shelf.put(scalars=[scalar(step, float(step), ts=later if step == 4 else START) for step in (1, 2, 3, 4)])
    target, report = shelf.export("openmetrics")
    found = samples(target)["rankscope_loss", (("rank", "0"),)]

    assert [(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)] == [(round((time - NOON) * 1000), value) for time, value in found]
    assert {} == report.omitted


def test_only_the_first_sample_of_a_time_is_written(shelf):
    shelf.put(scalars=[scalar(1, 1.0), scalar(1, 2.0)])
    target, report = shelf.export("openmetrics")

    assert [(NOON + 1, 1.0)] == samples(target)["rankscope_loss", (("rank", "0"),)]
    assert {"samples of one series at one time: only the first is written": 1} == report.omitted


def test_value_invalid_for_a_counter_is_a_gauge(shelf):
    shelf.put(scalars=[scalar(s, v, "tokens_total", unit="tokens") for s, v in enumerate([1, -1, math.nan], 1)])
    found = samples(shelf.export("openmetrics")[0])
    gauge = "rankscope_scalar", (("name", "tokens_total"), ("rank", "0"), ("unit", "tokens"))

    assert [(NOON + 1, 1.0)] == found["rankscope_tokens_total", (("rank", "0"),)]
    assert repr([(NOON + 2, -1.0), (NOON + 3, math.nan)]) == repr(found[gauge])


def test_rows_without_time_or_metric_are_counted(shelf):
    labels = '{"bad-name":"x"}'
    shelf.put(
        scalars=[scalar(1, 1.0, ts=None), scalar(1, 1.0)],
        events=[row(type="note")],
        samples=[
            row(target="t", metric="up", value=1.0, labels=labels),
            row(target="t", metric="no metric", value=1.0),
            row(target="t", metric="up", value=0.0, labels='{"a":"b"}'),
        ],
    )
    target, report = shelf.export("openmetrics")

    assert [(NOON + 1, 0.0)] == samples(target)["up", (("a", "b"),)]
    assert {
        "rows without a time": 1,
        "events: not a number over time": 1,
        "samples of 'no metric': not a valid metric name": 1,
        "samples whose labels cannot be written": 1,
    } == report.omitted


def test_log_without_times_and_a_folder_as_target_are_rejected(shelf):
    shelf.put(scalars=[scalar(1, 1.0, ts=None)])
    with pytest.raises(ExportError, match="logs without times"):
        shelf.export("openmetrics")
    shelf.put(scalars=[scalar(1, 1.0)])
    with pytest.raises(ExportError, match="is a folder: name a file"):
        shelf.export("openmetrics", "store")


def test_promtool_creates_blocks_from_the_file(shelf, require_server):
    """Every sample arrives in the millisecond it belongs to, with all its digits."""
    promtool = require_server("promtool", "prometheus")
    times = {step: START + dt.timedelta(milliseconds=1373 * step) for step in range(1, 500)}
    shelf.put(
        scalars=[scalar(step, 1 / 3 * step, ts=ts, rank=rank) for step, ts in times.items() for rank in (0, 1)],
        tensor_stats=[tensor(step, 'o"dd\n\\', ts=ts) for step, ts in times.items()],
    )
    target, _ = shelf.export("openmetrics")
    folder = shelf.folder / "tsdb"
    command = [promtool, "tsdb", "create-blocks-from", "openmetrics", target, folder]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 0 == made.returncode, made.stderr
    (folder / "wal").mkdir()
    dumped = subprocess.run([promtool, "tsdb", "dump", folder], capture_output=True, text=True, check=True).stdout
    loss = re.findall(r'^\{__name__="rankscope_loss".*rank="1".*\} (\S+) (\d+)$', dumped, re.MULTILINE)

    assert [(1 / 3 * n, NOON * 1000 + 1373 * n) for n in times] == [(float(v), int(t)) for v, t in loss]
    assert 499 == dumped.count(r'__name__="rankscope_tensor_value"')
