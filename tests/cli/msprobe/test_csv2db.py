"""Conversion of msprobe's output to the database of msprobe 8.3.0, which was compared with that of msprobe itself."""

import contextlib
import shutil
import sqlite3
from dataclasses import fields

import pytest
from tests.cli.msprobe.conftest import OUTPUT, SINGLE, STATISTICS, TENSOR_TYPES, TWO_RANKS, csv_rows, without_nan

from rankscope.msprobe import CSV2DBConfig, csv2db
from rankscope.msprobe.csv2db import csv2db as as_in_msprobe


def query(database, statement):
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return connection.execute(statement).fetchall()


def database_rows(database):
    """Return the statistics by rank, data type, step, name, virtual stage and micro-step."""
    found = {}
    for metric, name in query(database, "SELECT metric_id, metric_name FROM monitoring_metrics"):
        stats = {stat for (stat,) in query(database, f"SELECT stat_name FROM metric_stats WHERE metric_id = {metric}")}
        names = [stat for stat in STATISTICS if stat in stats]
        tables = f"SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'metric_{metric}_step_%'"
        for (table,) in query(database, tables):
            rows = query(
                database,
                f"SELECT rank, step, target_name, vpp_stage, micro_step, {', '.join(names)} "
                f"FROM {table} JOIN monitoring_targets USING (target_id)",
            )
            found |= {(row[0], name, *row[1:5]): dict(zip(names, row[5:], strict=True)) for row in rows}
    return found


def expected_rows(output, types=(*TENSOR_TYPES, "other")):
    return {
        (rank, data_type, int(row["step"]), row["name"], int(row["vpp_stage"]), int(row.get("micro_step", 0))): (
            without_nan(row)
        )
        for rank, data_type, row in csv_rows(output, types)
    }


def put(tmp_path, name, text, rank=0):
    folder = tmp_path / "out" / f"Dec03_21-34-40-rank{rank}-0123abcd"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def convert(tmp_path, **arguments):
    csv2db(CSV2DBConfig(**{"monitor_path": str(TWO_RANKS), "output_dirpath": str(tmp_path), **arguments}))
    return tmp_path / "monitor_metrics.db"


def test_arguments_and_defaults_are_those_of_the_manual():
    defaults = {"time_start": None, "time_end": None, "process_num": 1, "data_type_list": None, "output_dirpath": None}

    assert csv2db is as_in_msprobe
    assert ["monitor_path", *defaults, "step_partition"] == [field.name for field in fields(CSV2DBConfig)]
    assert CSV2DBConfig("out", **defaults, step_partition=500) == CSV2DBConfig("out")


@pytest.mark.parametrize(("output", "process_num"), [(SINGLE, 8), (TWO_RANKS, 1), (TWO_RANKS, 8)])
def test_every_row_of_msprobe_is_in_the_database(output, process_num, tmp_path):
    database = convert(tmp_path, monitor_path=str(output), process_num=process_num)

    assert expected_rows(output) == database_rows(database)


def test_tables_are_those_of_msprobe(tmp_path):
    database = convert(tmp_path, data_type_list=["grad_reduced", "exp_avg"], step_partition=10)
    tables = {name for (name,) in query(database, "SELECT name FROM sqlite_master WHERE type = 'table'")}
    facts = {"max_rank": 1, "min_step": 0, "max_step": 5, "step_partition_size": 10}

    assert {
        "monitoring_targets", "monitoring_metrics", "metric_stats", "global_stats", "sqlite_sequence",
        "metric_1_step_0_9", "metric_2_step_0_9",
    } == tables  # fmt: skip
    assert facts == dict(query(database, "SELECT stat_name, stat_value FROM global_stats"))


def test_ranks_with_different_statistics_share_a_table(tmp_path):
    for rank, columns in enumerate(("norm,mean", "mean,nans")):
        put(tmp_path, "actv_0-0.csv", f"vpp_stage,name,step,{columns}\n0,a.input,0,1,2\n", rank)
    database = convert(tmp_path, monitor_path=str(tmp_path / "out"))

    assert [(0, 1.0, None, 2.0), (1, None, 2.0, 1.0)] == query(
        database, "SELECT rank, norm, nans, mean FROM metric_1_step_0_499"
    )


def test_default_output_is_in_the_monitor_output_and_in_the_config(tmp_path):
    shutil.copytree(SINGLE, tmp_path / "out")
    config = CSV2DBConfig(monitor_path=str(tmp_path / "out"))
    csv2db(config)
    (database,) = (tmp_path / "out").glob("*-csv2db/monitor_metrics.db")

    assert str(database.parent) == config.output_dirpath


def test_file_that_is_no_such_database_is_not_replaced(tmp_path):
    (tmp_path / "monitor_metrics.db").write_text("mine")
    with pytest.raises(ValueError, match="choose another output_dirpath"):
        convert(tmp_path)

    assert "mine" == (tmp_path / "monitor_metrics.db").read_text()


@pytest.mark.parametrize("name", ["actv_0-999999999999999999.csv", "actv_0-9.csv"])
def test_hostile_files_end_with_a_database(name, tmp_path, capsys):
    put(tmp_path, name, "vpp_stage,name,step,norm\n0,a.input,0,1\n")
    put(tmp_path, "exp_avg_0-0.csv", "")
    put(tmp_path, "other_0-0.csv", (OUTPUT / "cc_misaligned" / "other_0-0.csv").read_text())
    database = convert(tmp_path, monitor_path=str(tmp_path / "out"))

    assert {(0, "actv", 0, "a.input", 0, 0): {"norm": 1.0}} == database_rows(database)
    assert "other_0-0.csv" in capsys.readouterr().err


@pytest.mark.parametrize("partition", [9, 10_000_001, 1.5])
def test_wrong_step_partition_is_an_error(partition, tmp_path):
    with pytest.raises(ValueError, match="step_partition must be an integer from 10 to 10,000,000"):
        convert(tmp_path, step_partition=partition)
