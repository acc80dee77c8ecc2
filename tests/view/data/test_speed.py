"""Speed, shares of time, slow and silent ranks, and the hints that an observation triggers."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pytest
from tests.view.data.test_curves import history
from tests.view.training import MAIN, Size, rank_scalars, run_row, scalars, trajectory, write

from rankscope_storage.connection import connect
from rankscope_view.data.hints import Area, tuning_hints
from rankscope_view.data.ranks import RECENT_STEPS, RankRow, RankTable, SlowRank, find_slow_ranks, rank_table
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
from rankscope_view.data.summary import read_summary
from rankscope_view.pages.ranks import verdicts
from rankscope_view.pages.sections import sections

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
        *(("with-fields", None, Method.FIELD, 0.8), ("with-flops", 1000.0, Method.FLOPS, 0.3)),
        *(("with-batch", None, Method.PACE, 60 * 0.25 / 32), ("with-flops", None, None, None)),
        *(("without-data-times", None, None, None), ("without-speed", None, None, None)),
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
SLOW_RANK = RankRow(rank=3, host="gpu-a", slow=SLOW)


@pytest.mark.parametrize(
    ("side", "words", "known", "more"),
    [
        (Area.DATA, "25 % of the step time is waiting for data", {"data_wait": Share(value=0.25, source="x")}, {}),
        (Area.DATA, "20 % fewer than the global batch", {"batch_check": BatchCheck(samples=80, global_batch=100)}, {}),
        (Area.COMPUTE, "used to 40 %", {}, {"utilization": Utilization(value=0.4, method=Method.NVML)}),
        (Area.COMMUNICATION, "30 % of the step time", {"collective": Share(value=0.3, source="x")}, {}),
        (
            Area.SYSTEM,
            "P10",
            {"throughput": throughput(np.where(np.arange(100) % 8, 100.0, 50 - np.arange(100) / 10))},
            {},
        ),
        (Area.SYSTEM, "fallen by 30 %", {"throughput": FALLING}, {}),
        (
            Area.SYSTEM,
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
    (found,) = verdicts(ranks(usual, dataclasses.replace(SLOW_RANK, phases=phases)), 0.0, is_live=True)

    assert "Data wait 0.106 s against 0.00184 s; forward 0.18 s against 0.15 s. Whole" in found.evidence


def test_run_with_good_numbers_has_no_hints():
    """Times in whole seconds: a quarter of the steps has the lowest value, which is P10."""
    good = {"data_wait": Share(value=0.01, source="x"), "collective": Share(value=0.05, source="x")}
    good["batch_check"] = BatchCheck(samples=101, global_batch=100)
    constant, seconds = throughput(np.full(100, 100.0)), throughput(np.where(np.arange(100) % 4, 0.5, 1 / 3))

    assert () == tuning_hints(speed(throughput=constant, **good), Utilization(value=0.95, method=Method.NVML))
    assert () == tuning_hints(speed(throughput=seconds), None)


PHASED_STEPS = 60
EVERY = {"data_wait": 1, "forward": 1, "backward": 1, "collective": 3, "checkpoint": 10, "evaluation": 20}
SECONDS = {"data_wait": 0.4, "forward": 0.1, "backward": 0.2, "collective": 0.6, "checkpoint": 3.0, "evaluation": 5.0}
RAW = """\
SELECT sum(value) FILTER (labels->>'$.phase' = '{phase}') / sum(value) AS share
FROM scalars WHERE run = 'r' AND name = 'step_phase_seconds' AND step > 0"""


@pytest.fixture(scope="module")
def shares(tmp_path_factory):
    tables, random = [], np.random.default_rng(3)
    for rank in range(2):
        step = np.arange(1, PHASED_STEPS)
        whole = np.where(np.arange(PHASED_STEPS) == 0, 20.0, 0.0)
        chosen = {"rank": rank, "incarnation": f"r-0-{rank}"}
        tables.append(phase_rows("first_step", np.array([0, 1]), np.array([20.0, 0.0]), chosen))
        for phase, every in EVERY.items():
            if phase == "collective" and rank == 1:
                continue  # the last rank does not wait
            at = step[step % every == 0]
            seconds = SECONDS[phase] * random.uniform(0.5, 1.5, len(at))
            whole[at] += seconds
            tables.append(phase_rows(phase, at, seconds, chosen))
        tables.append(scalars("r", "step_seconds", np.arange(PHASED_STEPS), whole, **chosen))
    batch = {"runs": run_row("r", "completed"), "scalars": pa.concat_tables(tables)}
    with connect(write(tmp_path_factory.mktemp("shares") / "store", batch)) as connection:
        yield connection


def phase_rows(phase, step, seconds, columns):
    return scalars("r", "step_phase_seconds", step, seconds, labels=json.dumps({"phase": phase}), **columns)


def raw_share(connection, phase):
    (row,) = connection.query(RAW.format(phase=phase)).to_pylist()
    return row["share"]


def test_shares_are_sums_over_the_sum_of_the_same_steps(shares):
    found = read_summary(shares, "r")
    expected = {phase: raw_share(shares, phase) for phase in EVERY}
    shown = dict(part.rsplit(" ", 2)[:2] for part in found.speed.time_spent.split(", "))
    lines = dict(row for section in sections(found) for row in section.rows)

    waits = (found.speed.data_wait.value, found.speed.collective.value)
    assert pytest.approx((expected["data_wait"], expected["collective"])) == waits
    assert {phase.replace("_", " "): f"{100 * share:.1f}" for phase, share in expected.items()} == shown
    assert f"{100 * expected['data_wait']:.0f} % of the step time is waiting for data" in found.hints[0].observation
    assert lines["time of a step"] == found.speed.time_spent
    assert f"{100 * expected['data_wait']:.1f} % of the step time" in lines["data wait"]


def test_time_in_collectives_that_only_some_ranks_have_is_no_communication(shares, opened):
    """A rank that is late does not wait: the shortest time of a step is that of the collective itself."""
    tables = [
        phase_rows(phase, np.arange(1, 21), np.full(20, seconds), {"rank": rank, "incarnation": f"r-0-{rank}"})
        for rank, wait in ((0, 0.6), (1, 0.1))
        for phase, seconds in (("data_wait", 1 - wait), ("collective", wait))
    ]
    late = read_summary(opened(runs=run_row("r", "completed"), scalars=pa.concat_tables(tables)), "r").speed
    other = read_summary(shares, "r").speed

    assert other.collective.value == pytest.approx(other.for_slower)
    assert (0.35, 0.25) == (pytest.approx(late.collective.value), pytest.approx(late.for_slower))


def test_phases_of_a_rank_are_those_of_an_average_step(shares):
    table = rank_table(shares, "r")
    raw = shares.query(
        f"""SELECT rank, labels->>'$.phase' AS phase, sum(value) / {RECENT_STEPS} AS seconds FROM scalars
        WHERE run = 'r' AND name = 'step_phase_seconds' AND step >= {PHASED_STEPS - RECENT_STEPS} GROUP BY ALL"""
    ).to_pylist()

    assert {(row["rank"], row["phase"]): pytest.approx(row["seconds"]) for row in raw} == {
        (row.rank, phase): seconds for row in table.rows for phase, seconds in row.phases.items()
    }
    assert [pytest.approx(row.step_seconds) for row in table.rows] == [sum(row.phases.values()) for row in table.rows]


def test_slow_rank_computes_longer_and_a_silent_one_has_no_new_rows(opened):
    size = Size(ranks=6, layers=1, steps=360)
    rows = rank_table(opened(scalars=rank_scalars("r", size, trajectory(size))), "r").rows
    slow = [row for row in rows if row.slow]

    assert [4] == [row.rank for row in slow]
    assert 0.31 == pytest.approx(slow[0].against_median, abs=0.02)
    assert 336 == slow[0].slow.since
    assert [5] == [row.rank for row in rows if row.is_silent]


PHASES = ("data_wait", "forward", "backward", "collective", "optimizer", "checkpoint")
STEPS = 200


def steps(ranks: int = 4, *, late=None, has_waits: bool = True, seed: int = 0) -> np.ndarray:
    """Return seconds of healthy ranks; `late` maps (rank, phase) to further seconds of each step."""
    random = np.random.default_rng(seed)
    seconds = np.array([0.01, 0.1, 0.2, 0.0, 0.02, 0.0]) * random.lognormal(0, 0.1, (ranks, STEPS, len(PHASES)))
    for (rank, phase), more in (late or {}).items():
        seconds[rank, :, PHASES.index(phase)] += more
    own = seconds.sum(axis=2)
    waits = own.max(axis=0) - own
    seconds[:, :, PHASES.index("collective" if has_waits else "forward")] += waits
    return seconds


def found_in(seconds: np.ndarray, first: int = 0):
    return find_slow_ranks(seconds, PHASES, range(first, first + seconds.shape[1]))


def every(interval: int, seconds: float) -> np.ndarray:
    return np.where(np.arange(STEPS) % interval == interval - 1, seconds, 0.0)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("phase", ["data_wait", "forward", "backward", "optimizer"])
def test_slow_rank_has_its_share_and_phase(ranks, phase):
    (found,) = found_in(steps(ranks, late={(1, phase): 0.33}))

    assert (1, phase, 0) == (found.row, found.phase, found.pauses)
    assert (0.5, 0.33) == (pytest.approx(found.share, abs=0.03), pytest.approx(found.seconds, abs=0.03))


@pytest.mark.parametrize(("phase", "interval"), [("checkpoint", 10), ("data_wait", 30), ("forward", 50)])
def test_rank_that_pauses_is_slow_until_its_pauses_stop(phase, interval):
    pauses = every(interval, 0.1 * interval)
    (found,) = found_in(steps(2, late={(0, phase): pauses}))

    assert (0, phase, STEPS // interval) == (found.row, found.phase, found.pauses)
    assert [] == found_in(steps(2, late={(0, phase): np.where(np.arange(STEPS) < 80, pauses, 0)}))


@pytest.mark.parametrize("first", [80, 150])
@pytest.mark.parametrize("count", [*range(1, 30, 2), 100])
def test_slowness_that_begins_late_is_no_pause(first, count):
    """A loader that takes 0.6 s of 0.9 s from a step on is called slow from the 16th step on, since the first one."""
    seconds = steps(2, late={(1, "data_wait"): np.where(np.arange(STEPS) < first, 0.0, 0.6)})[:, : first + count]
    found = found_in(seconds, 1000)

    assert bool(found) == (count >= 16) or count == 15  # a step of noise before it may be slow
    assert {(1, 0, 1000 + first)} >= {(one.row, one.pauses, one.since) for one in found}


def test_rank_is_slow_since_its_first_slow_step_despite_evaluations():
    """At steps 60 and 79, both ranks wait for an evaluation, so that the ratio of their times is usual."""
    seconds = np.full((2, 80, 1), 0.1)
    seconds[1, 20:] = 0.2
    seconds[:, [60, 79]] += 3.0
    (found,) = find_slow_ranks(seconds, ["data_wait"], range(80))

    assert "since step 20" in found.words


def test_past_slowness_and_pauses_of_all_ranks_make_no_rank_slow():
    late = np.where((np.arange(STEPS) >= 80) & (np.arange(STEPS) < 120), 0.6, every(25, 0.6))

    assert [] == found_in(steps(2, late={(1, "data_wait"): late}))
    assert [] == found_in(steps(late={(rank, "checkpoint"): every(10, 2.0) for rank in range(4)}))


@pytest.mark.parametrize("ranks", [2, 4])
def test_slow_input_is_found_where_the_forward_pass_contains_waits(ranks):
    """The broadcast of buffers of DDP, and the shards of FSDP: the others wait in their forward passes."""
    seconds = steps(ranks, late={(1, "data_wait"): 0.33}, has_waits=False)
    (found,) = found_in(seconds)
    assert (1, "data_wait") == (found.row, found.phase)
    assert [] == found_in(steps(late={(1, "forward"): 0.33}, has_waits=False)), "looks like a wait"

    seconds[:, :, PHASES.index("collective")] += steps(ranks, seed=1)[:, :, PHASES.index("collective")]
    (found,) = found_in(seconds)
    assert (1, "data_wait", 0) == (found.row, found.phase, found.pauses)
    assert 0.33 == pytest.approx(found.seconds, abs=0.05)


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_healthy_ranks_are_not_slow(ranks):
    assert [] == [one for seed in range(40) for one in found_in(steps(ranks, seed=seed))]


def test_missing_steps_of_a_rank_are_not_compared():
    seconds = steps(late={(1, "forward"): 0.33})
    seconds[0, :150], seconds[3, 190:] = np.nan, np.nan
    (found,) = found_in(seconds)

    assert (1, "forward") == (found.row, found.phase)
