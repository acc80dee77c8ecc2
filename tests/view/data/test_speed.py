"""Speed and utilisation of a run, with their sources, and the hints that an observation triggers."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pytest
from tests.view.data.test_curves import history
from tests.view.training import MAIN, run_row, scalars, write

from rankscope_storage.connection import connect
from rankscope_view.data.hints import Side, tuning_hints
from rankscope_view.data.ranks import RankRow, RankTable
from rankscope_view.data.slow_ranks import SlowRank
from rankscope_view.data.speed import (
    BatchCheck,
    Method,
    Share,
    Speed,
    Throughput,
    Utilization,
    read_speed,
    read_utilization,
)
from rankscope_view.pages.ranks import verdicts

STEP = np.arange(40)
SAMPLES = {"samples_per_second": 60.0, "step_seconds": np.where(STEP < 4, 0.25, 0.4), "global_batch_size": 32.0}
FIELDS = {"samples_per_second": 100.0 + STEP, "step_seconds": 0.4, "global_batch_size": 32.0, "data_time": 0.1}
VALUES = {
    "with-fields": FIELDS,
    "with-batch": SAMPLES | {"data_time": 0.01},
    "without-data-times": SAMPLES,
    "with-totals": {"tokens_total": 1000.0 * STEP, "step_seconds": 0.5},
    "with-flops": {"tflops_per_gpu": 300.0, "step_seconds": 0.5},
    "without-speed": {"loss": 2.0},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    batches = []
    for run, values in VALUES.items():
        tables = [scalars(run, name, STEP, value + 0.0 * STEP) for name, value in values.items()]
        for gpu in range(2) if run == "with-fields" else ():
            known = {"labels": json.dumps({"gpu": str(gpu)}), "unit": "percent", "rank": None}
            tables.append(scalars(run, "gpu_util", STEP, 70.0 + 20 * gpu + 0 * STEP, **known))
        batches.append({"runs": run_row(run, "completed"), "scalars": pa.concat_tables(tables)})
    with connect(write(tmp_path_factory.mktemp("speed") / "store", *batches)) as opened:
        yield opened


@pytest.mark.parametrize(
    ("run", "source", "median"),
    [
        ("with-fields", "samples_per_second", 119.5),
        ("with-totals", "tokens_total and step_seconds", 2000.0),
        ("with-flops", "tflops_per_gpu", 300.0),
    ],
)
def test_throughput_names_the_scalars_that_it_comes_from(store, run, source, median):
    found = read_speed(store, run, {}, None).throughput

    assert (source, median) == (found.source, pytest.approx(found.median))


def test_p10_is_linear_and_strictly_above_the_marked_values(store):
    found = read_speed(store, "with-fields", {}, None).throughput
    (low,) = store.query(
        "SELECT quantile_cont(value, 0.1) AS low FROM scalars WHERE run = 'with-fields' AND name = 'samples_per_second'"
    )["low"].to_pylist()
    constant = throughput([5.0] * 9)

    assert (pytest.approx(low), 4) == (found.low, found.rows_below)
    assert (5.0, 0) == (constant.low, constant.rows_below)


def test_throughput_times_step_time_is_checked_against_the_batch(store):
    found = read_speed(store, "with-fields", {}, None)

    assert 47.8 == pytest.approx(found.batch_check.samples)
    assert (True, False) == (found.batch_check.is_off, BatchCheck(samples=34, global_batch=32).is_off)
    assert Share(value=pytest.approx(0.25), source="data_time / step_seconds") == found.data_wait


def test_global_batch_may_be_in_the_configuration(store):
    assert 256 == read_speed(store, "with-totals", {}, '{"train": {"global_batch_size": 256}}').global_batch


@pytest.mark.parametrize(
    ("run", "peak", "method", "value"),
    [
        ("with-fields", None, Method.FIELD, 0.8),
        ("with-flops", 1000.0, Method.FLOPS, 0.3),
        ("with-batch", None, Method.PACE, 60 * 0.25 / 32),
        ("with-flops", None, None, None),
        ("without-data-times", None, None, None),
        ("without-speed", None, None, None),
    ],
)
def test_utilisation_names_its_method(store, run, peak, method, value):
    found = read_utilization(store, run, read_speed(store, run, {}, None), peak_tflops=peak)

    assert method == (found and found.method)
    assert value is None or value == pytest.approx(found.value)


def test_each_gpu_has_the_quantiles_of_sql(connection):
    found = read_utilization(connection, MAIN, read_speed(connection, MAIN, {}, None))
    rows = connection.query(
        f"""SELECT rank, quantile_cont(value, [0.05, 0.25, 0.5, 0.75, 0.95]) AS quantiles FROM scalars
        WHERE run = '{MAIN}' AND name = 'gpu_utilization' GROUP BY rank ORDER BY rank"""
    ).to_pylist()

    assert Method.NVML == found.method
    assert [(row["rank"], tuple(row["quantiles"])) for row in rows] == [(one.rank, one.quantiles) for one in found.gpus]


def throughput(values) -> Throughput:
    return Throughput(
        name="samples_per_second", unit="samples/s", source="samples_per_second", ranks=1, history=history(values)
    )


def speed(**changes) -> Speed:
    names = ("throughput", "step_times", "step_seconds", "first_step_seconds", "global_batch", "batch_check")
    return Speed(**dict.fromkeys((*names, "data_wait", "collective")) | changes)


FALLING = throughput(np.where(STEP < 30, 100.0, 70.0))


def ranks(*rows: RankRow) -> RankTable:
    return RankTable(attempt=0, rows=rows, last_step=9, median_step=1.0)


SLOW = SlowRank(row=3, seconds=0.9, share=0.31, phase="forward", steps=20, pauses=0, since=790)
SLOW_RANK = RankRow(rank=3, host="gpu-a", is_slow=True, slow=SLOW)


@pytest.mark.parametrize(
    ("side", "words", "known", "more"),
    [
        (Side.DATA, "25 % of the step time is waiting for data", {"data_wait": Share(value=0.25, source="x")}, {}),
        (Side.DATA, "20 % fewer than the global batch", {"batch_check": BatchCheck(samples=80, global_batch=100)}, {}),
        (Side.COMPUTE, "used to 40 %", {}, {"utilization": Utilization(value=0.4, method=Method.NVML)}),
        (Side.COMMUNICATION, "30 % of the step time", {"collective": Share(value=0.3, source="x")}, {}),
        (
            Side.SYSTEM,
            "P10",
            {"throughput": throughput(np.where(np.arange(100) % 8, 100.0, 50 - np.arange(100) / 10))},
            {},
        ),
        (Side.SYSTEM, "fallen by 30 %", {"throughput": FALLING}, {}),
        (
            Side.SYSTEM,
            "rank 3 on gpu-a is slow in forward: the others wait 0.9 s a step, 31 % of the time, since step 790",
            {},
            {"ranks": ranks(SLOW_RANK)},
        ),
    ],
)
def test_hint_has_the_observation_that_triggers_it(side, words, known, more):
    hints = tuning_hints(speed(**known), more.get("utilization"), more.get("ranks"))

    assert side in [hint.side for hint in hints if words in hint.observation and hint.actions]


def actions(hints) -> str:
    return " ".join(action for hint in hints for action in hint.actions or ["none"])


def test_wait_for_a_slow_loader_is_not_blamed_on_the_network():
    """All ranks spend 4 % in the reduction, and the others 30 % in waiting for the loader of rank 3."""
    slow = dataclasses.replace(SLOW_RANK, slow=dataclasses.replace(SLOW, phase="data_wait"))
    known = {"collective": Share(value=0.34, source="x"), "throughput": FALLING}
    hints = tuning_hints(speed(**known, for_slower=0.3), None, ranks(slow))
    words = ("num_workers", "bucket size", "power limit", "disk")

    waiting = "34 % of the step time is waiting for other ranks (x), 30 % for slower ones"
    assert waiting in [one.observation for one in hints]
    assert ["num_workers"] == [one for one in words if one in actions(hints)]


def test_training_on_a_cpu_has_no_advice_about_gpus(store):
    assert None is read_utilization(store, "with-batch", read_speed(store, "with-batch", {}, '{"device": "cpu"}'))
    shares = {"data_wait": Share(value=0.25, source="x"), "collective": Share(value=0.3, source="x")}
    gpus, cpu = (
        actions(tuning_hints(speed(**shares, has_gpus=has, throughput=FALLING), None, ranks(SLOW_RANK)))
        for has in (True, False)
    )

    assert all(word in gpus and word not in cpu for word in ("GPU", "PCIe", "NVLink", "pinned"))
    assert "num_workers" in cpu
    assert "processors" in cpu
    assert "none" not in gpus + cpu


def test_evidence_of_a_slow_rank_begins_with_the_phase_that_costs_most():
    usual = RankRow(rank=0, host="a", phases={"backward": 0.00106, "data_wait": 0.00184, "forward": 0.15})
    phases = {"backward": 0.00117, "data_wait": 0.106, "forward": 0.18}
    shown = "".join(verdicts(ranks(usual, dataclasses.replace(SLOW_RANK, phases=phases)), 0.0, is_live=True))

    assert "Data wait 0.106 s against 0.00184 s; forward 0.18 s against 0.15 s. Whole" in shown


def test_run_with_good_numbers_has_no_hints():
    """Times in whole seconds: a quarter of the steps has the lowest value, which is P10."""
    good = {"data_wait": Share(value=0.01, source="x"), "collective": Share(value=0.05, source="x")}
    good["batch_check"] = BatchCheck(samples=101, global_batch=100)
    constant, seconds = throughput(np.full(100, 100.0)), throughput(np.where(np.arange(100) % 4, 0.5, 1 / 3))

    assert () == tuning_hints(speed(throughput=constant, **good), Utilization(value=0.95, method=Method.NVML))
    assert () == tuning_hints(speed(throughput=seconds), None)
