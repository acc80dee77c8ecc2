"""From tensor to DuckDB with real processes: each step, rank and tensor is stored once, with exact values."""

import json
import math
import random
import time
from pathlib import Path

import pytest

from rankscope_storage.base.datasets import TENSOR_ROW_KEY
from rankscope_storage.connection import connect

TRAINING = Path(__file__).with_name("tiny_training.py")
LAST_ODD_STEP = 5
RELATIVE = 1e-5
AWKWARD_RUN = "../réseau a=b/'\"%41\n№ 7"


def rows_of(store):
    with connect(store) as connection:
        return connection.sql("select * from tensor_stats").to_arrow_table().to_pylist()


def assert_each_once(expected, rows):
    keys = [(row["rank"], row["step"], row["kind"], row["tensor"]) for row in rows]

    assert expected == set(keys)
    assert len(expected) == len(keys)
    assert len(rows) == len({tuple(row[name] for name in TENSOR_ROW_KEY) for row in rows})


@pytest.mark.thorough
def test_service_killed_five_times_stores_each_exact_row_once(service, start_ranks, tmp_path):
    """The service is killed at random times, also during polls, flushes and commits, and restarted immediately."""
    draw = random.Random(7)
    service.start()
    ranks = start_ranks(TRAINING, tmp_path, 0, 0.1, run=AWKWARD_RUN)
    service.wait_for(lambda: service.runs() and service.runs()[0]["step"])
    for _ in range(5):
        time.sleep(draw.uniform(0.3, 1.8))
        service.kill()
        service.start()
    service.wait_for(lambda: service.runs() and (service.runs()[0]["step"] or 0) >= LAST_ODD_STEP)

    (tmp_path / "stop").touch()

    assert [0, 0] == [rank.wait(120) for rank in ranks], (tmp_path / "training.log").read_text()
    assert 0 == service.stop(), service.log()
    lines = [
        {"rank": rank, **json.loads(line)}
        for rank in range(2)
        for line in (tmp_path / f"reference-{rank}.jsonl").read_text().splitlines()
    ]
    expected = {(row["rank"], row["step"], row["kind"], row["tensor"]): row for row in lines}
    rows = rows_of(service.store)
    assert {AWKWARD_RUN} == {row["run"] for row in rows}
    assert_each_once(set(expected), rows)
    for row in rows:
        truth = expected[row["rank"], row["step"], row["kind"], row["tensor"]]
        for op in ("norm", "min", "max"):
            assert row[op] == pytest.approx(truth[op], rel=RELATIVE, abs=1e-30), (row, truth)
        assert abs(row["mean"] - truth["mean"]) <= RELATIVE * truth["scale"], (row, truth)
        for op in ("nans", "infs", "zeros", "numel"):
            assert truth[op] == row[op], (op, row, truth)
    assert_odd_numbers_are_kept_apart(service.store)


def assert_odd_numbers_are_kept_apart(store):
    with connect(store) as connection:
        spoiled = connection.sql(
            "select nans, infs, zeros, norm from tensor_stats"
            " where kind = 'grad_unreduced' and nans > 0 and tensor = 'first.weight'"
        ).fetchall()
        scalars = connection.sql("select name, value from scalars where step = 5 and rank = 1").fetchall()
        states = connection.sql("select state from runs").fetchall()
        exits = connection.sql("select count(*) from events where type = 'exit'").fetchall()
        skipped = connection.sql("select distinct step from events where type = 'step_skipped'").fetchall()
    by_name = dict(scalars)

    assert [(1, 1)] == [(nans, infs) for nans, infs, _, _ in spoiled]
    assert all(zeros >= 1 and math.isfinite(norm) for _, _, zeros, norm in spoiled)
    assert math.isnan(by_name["grad_norm"])
    assert 0.0 == by_name["zero"]
    assert "absent" not in by_name
    assert [("completed",)] == states
    assert [(2,)] == exits
    assert [(5,)] == skipped
