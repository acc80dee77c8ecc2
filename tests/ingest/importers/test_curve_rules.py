"""Rules for curves of logs, which fire once and not for healthy curves; numbers in text; attempts of steps."""

import math
import random
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract.rules.curve import CurveRule, SeriesEvaluator
from rankscope_ingest.importers.common.rules import IMPORT_RULES, CurveEvaluator
from rankscope_ingest.importers.common.steps import StepStreams
from rankscope_ingest.importers.common.values import micros, number, quantity, whole

CURVE_RULES = tuple(rule for rule in IMPORT_RULES if isinstance(rule, CurveRule))

ROWS = 20_000
HEALTHY_RECORDED = (
    *("field_logs/automodel_tps.log", "field_logs/litgpt_console.log", "field_logs/metaseq_opt.log"),
    *("field_logs/seed003_without_steps.jsonl", "jsonl/nsllm_llamafactory_trainer_log.jsonl"),
    *("jsonl/synthetic_seed003_demo.jsonl", "megatron/synthetic_moe_default7_clean.log"),
    *("megatron/synthetic_current-slash-average.log", "megatron/bigscience_tr8-104B_chronicle.log"),
    *("trainer_state/nsllm_finished.json", "trainer_state/stanford-alpaca_oldformat_finished.json"),
)
TIMES = np.arange(ROWS)


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=ROWS)


HEALTHY: Mapping[str, tuple[str, np.ndarray]] = {
    "falling": ("loss", 2 + 8 * np.exp(-TIMES / 3000) + 0.1 * noise(1)),
    "crosses 0": ("loss", 3 - 6 * TIMES / ROWS + 0.3 * noise(2)),
    "around 0": ("loss", 0.3 * noise(3)),
    "near 0": ("loss", 0.05 + 0.05 * noise(4)),
    "cyclic learning rate": ("loss", 2 + np.sin(TIMES / 200) + 0.2 * noise(5)),
    "warm restarts": ("loss", 2 + 1.5 * (TIMES % 1000) / 1000 + 0.1 * noise(6)),
    "skewed norm": ("grad_norm", np.exp(0.6 * noise(7))),
    "jitter of speed": ("step_seconds", np.exp(0.3 * noise(8))),
    "jitter of throughput": ("tokens_per_second", 1000 * np.exp(0.3 * noise(9))),
}


def tables(curves: Mapping[str, np.ndarray], first: int = 0, pauses: tuple[int, ...] = ()) -> dict[str, pa.Table]:
    """Return the tables of records; record n has a value of each curve."""
    count = len(next(iter(curves.values())))
    rows = count * len(curves)
    scalars = pa.table(
        {
            "name": np.repeat(list(curves), count),
            "value": np.concatenate(list(curves.values())),
            "seq": np.tile(np.arange(first, first + count), len(curves)),
            "incarnation": ["import-a"] * rows,
            "attempt": np.zeros(rows, np.int32),
            "rank": pa.nulls(rows, pa.int32()),
            "labels": pa.nulls(rows, pa.string()),
        }
    )
    events = pa.table({"type": ["evaluation"] * len(pauses), "seq": pa.array(pauses, pa.int64())})
    return {"scalars": scalars, "events": events}


def firings(curves: Mapping[str, np.ndarray], pauses: tuple[int, ...] = ()) -> list[tuple[str, int]]:
    """Return the names of the rules that fire, with the numbers of the records."""
    given = tables(curves, pauses=pauses)
    found = CurveEvaluator(CURVE_RULES).evaluate(given)
    return [
        (firing.rule.name, seq) for firing in found for seq in given["scalars"]["seq"].take(firing.rows).to_pylist()
    ]


def test_healthy_curves_have_at_most_one_event_in_20_000_rows():
    found = {about: len(firings({name: values})) for about, (name, values) in HEALTHY.items()}

    assert all(count <= 1 for count in found.values()), found


@pytest.mark.parametrize("deviation", [0.005, 0.02, 0.05, 0.1, 0.2])
def test_spike_of_2_4_times_is_found_and_healthy_losses_have_no_event(deviation):
    """D-601: losses that fall after a warm-up, with lognormal noise; 40,000 rows of each deviation."""
    rows, random = np.arange(2_000), np.random.default_rng(int(1000 * deviation))
    healthy, found = 0, 0
    for _ in range(20):
        start, share, decay, warm_up = random.uniform((2, 0.05, 50, 0), (11, 0.5, 1000, 200))
        curve = start * (share + (1 - share) * np.exp(-np.maximum(0, rows - warm_up) / decay))
        losses = curve * np.exp(deviation * random.normal(size=len(rows)))
        healthy += len(firings({"loss": losses}))
        place = random.integers(warm_up + 100, len(rows))
        losses[place] = 2.42 * curve[place]
        found += ("LossSpike", place) in firings({"loss": losses})

    assert 0 == healthy
    assert found >= (20 if deviation < 0.1 else 17 if deviation == 0.1 else 0)


@pytest.mark.usual(5)
@pytest.mark.parametrize("log", HEALTHY_RECORDED)
def test_healthy_recorded_log_has_no_event(logs, data, log):
    logs.import_log(data / log)
    names = ", ".join(f"'{rule.name}'" for rule in CURVE_RULES)

    assert [] == logs.query(f"SELECT rule, op, step FROM events WHERE type = 'error' OR rule IN ({names})")


@pytest.mark.parametrize("growth", [0.015, 0.02, 0.03, 0.05, 0.1, 0.15, 0.3])
def test_loss_that_grows_a_few_percent_per_row_is_found(growth):
    loss = (2 + 3 * np.exp(-np.arange(400) / 40)) * (1 + 0.03 * noise(2)[:400])
    loss[100:] *= (1 + growth) ** np.arange(300)
    fired = [row for name, row in firings({"loss": loss}) if name == "LossSpike"]

    assert loss[100] < loss[fired[0]] < 3.6 * loss[100]
    assert [*range(fired[0], 400)] == fired


@pytest.mark.parametrize(("deviation", "least"), [(0.01, 190), (0.03, 150)])
def test_spike_on_a_steep_curve_is_found(deviation, least):
    random, rows, found = np.random.default_rng(3), np.arange(120), 0
    for place in range(25, 65, 2):
        for _ in range(10):
            losses = (0.5 + 9 * np.exp(-rows / 15)) * (1 + deviation * random.normal(size=len(rows)))
            assert [] == firings({"loss": losses})
            losses[place] *= 2.5
            found += ("LossSpike", place) in firings({"loss": losses})

    assert found >= least


def test_spike_fires_until_the_loss_has_returned():
    loss = 2 + 2 * np.exp(-np.arange(300) / 60) + 0.02 * noise(1)[:300]
    loss[[40, 120, 121, 250]] *= 6
    norm = np.exp(0.1 * noise(2)[:300])
    norm[[119, 200]] *= 45

    assert [
        *(("LossSpike", 40), ("LossSpike", 120), ("LossSpike", 121), ("LossSpike", 250), ("GradNormSpike", 119)),
        ("GradNormSpike", 200),
    ] == firings({"loss": loss, "grad_norm": norm})


def test_rules_apply_from_the_20th_row_on():
    loss = np.r_[np.full(19, 2.0), 9.0]
    rate = np.r_[np.full(19, 1e-3), 2e-3]

    assert [("LossSpike", 19), ("LearningRateJump", 19)] == firings({"loss": loss, "learning_rate": rate})
    assert [] == firings({"loss": loss[1:], "learning_rate": rate[1:]})


SCHEDULE = np.arange(600)
HEALTHY_RATES: Mapping[str, np.ndarray] = {
    "linear warm-up and cosine": np.minimum(1, (SCHEDULE + 1) / 60) * (1 + np.cos(np.pi * SCHEDULE / 600)),
    "warm-up of 10,000 steps, one row in 100": np.minimum(1, SCHEDULE / 100),
    "steps": 0.1 ** (SCHEDULE // 150),
    "one cycle": np.interp(SCHEDULE, [0, 180, 600], [0.04, 1, 4e-6]),
    "warm restarts": 1 + np.cos(np.pi * (SCHEDULE % 100) / 100),
    "falling warm restarts": 0.7 ** (SCHEDULE // 100) * (1 + np.cos(np.pi * (SCHEDULE % 100) / 100)),
    "triangles": 0.01 + np.abs((SCHEDULE + 50) % 100 - 50) / 50,
    "inverse square root": np.minimum((SCHEDULE + 1) * 40**-1.5, (SCHEDULE + 1) ** -0.5),
    "printed with 6 digits": np.round(np.minimum(1, SCHEDULE / 500) * 1e-5, 6),
}


@pytest.mark.parametrize("schedule", HEALTHY_RATES)
def test_schedule_of_the_learning_rate_is_no_jump(schedule):
    assert [] == firings({"learning_rate": 3e-4 * HEALTHY_RATES[schedule]})


@pytest.mark.parametrize("schedule", ["linear warm-up and cosine", "steps", "one cycle"])
def test_learning_rate_above_every_earlier_one_is_a_jump(schedule):
    rate = HEALTHY_RATES[schedule].copy()
    rate[250:] *= 20

    assert [("LearningRateJump", 250)] == firings({"learning_rate": rate})


def test_ranks_judge_each_value_as_imports_judge_the_table():
    random = np.random.default_rng(8)
    curve = np.exp(0.3 * random.normal(size=900)) * np.where(random.random(900) < 0.02, 40, 1)
    curve[random.random(900) < 0.05] = np.nan
    grows = (2 + 0.02 * noise(9)[:900]) * 1.04 ** np.clip(np.arange(900) - 300, 0, 200)
    rate = np.cumprod(1 + (random.random(900) < 0.02) * random.random(900))
    for name, values in [("loss", curve), ("loss", grows), ("learning_rate", rate), ("grad_norm", curve**2)]:
        evaluator = SeriesEvaluator(CURVE_RULES, None, "value", name)
        judged = enumerate(map(evaluator.observe, values.tolist()))
        found = [(firing.rule.name, place) for place, firing in judged if firing is not None]

        assert firings({name: values}) == found
        assert len(found) > 2


def test_nonfinite_values_do_not_count_as_history():
    loss = np.r_[np.full(30, 2.0), np.full(30, np.nan), np.full(15, 2.0), 12.0, np.full(5, 2.0), 12.0]

    assert [("LossSpike", 75), ("LossSpike", 81)] == firings({"loss": loss})


@pytest.mark.parametrize("name", ["step_seconds", "tokens_per_second"])
def test_third_slow_row_fires(name):
    seconds = np.r_[np.full(5, 9.0), 1 + 0.1 * np.sin(np.arange(45)), np.full(20, 3.0)]
    values = seconds if name == "step_seconds" else 1 / seconds

    assert [("SlowSteps", 52)] == firings({name: values})


def test_rate_of_zero_is_no_value():
    rates = 1 / np.r_[1 + 0.1 * np.sin(np.arange(50)), np.full(20, 3.0)]
    rates[[10, 30]] = 0.0

    assert [("SlowSteps", 52)] == firings({"tokens_per_second": rates})


def test_rules_of_curves_judge_values_of_scalars_only():
    series = [(kind, op) for kind in (None, "grad_reduced") for op in ("value", "norm")]

    assert [(None, "value")] * len(CURVE_RULES) == [one for rule in CURVE_RULES for one in series if rule.judges(*one)]


def test_slow_rows_next_to_evaluations_and_few_slow_rows_do_not_fire():
    seconds = np.ones(100)
    seconds[[30, 31, 60, 61, 62]] = 4.0

    assert [("SlowSteps", 62)] == firings({"step_seconds": seconds})
    assert [] == firings({"step_seconds": seconds}, pauses=(61,))


def test_firings_do_not_depend_on_the_division_of_the_log():
    curves = {
        "loss": np.exp(0.4 * noise(1)[:600]) * np.where(np.arange(600) % 97 == 96, 40, 1),
        "step_seconds": np.where(np.arange(600) % 100 > 95, 4.0, 1.0),
    }
    curves["grad_norm"] = np.ones(600) * 1.2 ** np.clip(np.arange(600) - 300, 0, 60)
    whole = [name for name, _ in firings(curves)]
    for size in (7, 128):
        evaluator = CurveEvaluator(CURVE_RULES)
        parts = [
            firing.rule.name
            for first in range(0, 600, size)
            for firing in evaluator.evaluate(tables({k: v[first : first + size] for k, v in curves.items()}, first))
            for _ in firing.rows
        ]
        assert len(whole) > 8
        assert sorted(whole) == sorted(parts)


# Numbers in text, and the attempts of steps; `cases` has stored names, units and durations.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("0.8674", (0.8674, None)), ("7.5e-05", (7.5e-05, None)), ("1,234.5", (1234.5, None))),
        *(("213.66ms", (213.66, "ms")), ("0.23%", (0.23, "%")), ("-Infinity", (-math.inf, None))),
        *(("1,234", (1234.0, None)), ("1,234,567 tok/s", (1234567.0, "tok/s")), ("0,439", (0.439, None))),
        *(("-12,5%", (-12.5, "%")), ("1,234e-05", (1.234e-05, None)), ("0,439,123", None), ("0,439.5", None)),
        *(("1,2,3", None), ("v1.2", None), ("1.2.3", None), ("2024-01-01", None), ("", None)),
    ],
)
def test_numbers_in_text_are_read_with_their_unit(text, expected):
    assert expected == quantity(text)


def test_numbers_steps_and_times_are_validated():
    """True is no number; a step is an integer; a time before this century is no time of a training."""
    assert [1.0, None, None, None, math.inf] == [number(value) for value in (1, True, "1", None, 10**400)]
    assert [3, 3, 12, None, None, None] == [whole(value) for value in (3, 3.0, "12", 3.5, 1e300, "12ms")]
    assert [1_700_000_000_000_000] * 4 == [micros(1_700_000_000 * 1000**power) for power in range(4)]
    assert [None, None, None] == [micros(12.5), micros(math.nan), micros("12:00")]
    assert 1_771_532_412_264_373 == micros("2026-02-19T20:20:12.264373+00:00")


def attempts(steps):
    streams = StepStreams()
    return [streams.attempt(None, step) for step in steps]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 10))
def test_rising_steps_are_one_attempt(rises, interval):
    """The intervals may differ, and records may repeat a step or have none."""
    steps, at = [], 0
    for rise in rises:
        at += interval if rise % 3 else rise
        steps += [at, None, at]

    assert {0} == set(attempts(steps))


@given(st.integers(2, 200), st.integers(1, 50), st.integers(1, 200))
def test_each_restart_adds_one_attempt(length, interval, back):
    """S0-09, S4-08: the restart may continue at any earlier step."""
    first = [interval * n for n in range(length)]
    again = [interval * n for n in range(max(0, length - 1 - back), length + 20)]

    assert [0] * len(first) + [1] * len(again) == attempts([*first, *again])


def test_streams_of_ranks_are_separate():
    """Contract 6."""
    streams = StepStreams()

    assert [0, 0, 0, 0] == [streams.attempt(rank, step) for rank, step in [(0, 5), (1, 4), (0, 6), (1, 5)]]


def _of_two_writers(order):
    """Return (writer, step, loss) in the order in which two writers appended to a log."""
    steps = [0, 0]
    for writer in order:
        steps[writer] += 1
        yield writer, 10 * steps[writer], (5.0, 9.0)[writer] - steps[writer] / 1000


def _mixed(found):
    """Return the number of records that are in an attempt of which most records are of the other writer."""
    # Repeated steps are not counted: they belong to the same attempt while the writers are at the same step.
    mixed = 0
    for group in found:
        most, _ = Counter(writer for writer, _ in group).most_common(1)[0]
        steps = {step for writer, step in group if writer == most}
        mixed += sum(writer != most and step not in steps for writer, step in group)
    return mixed


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("burst", [1, 7, 20])
def test_two_writers_of_one_file_are_two_streams(seed, burst):
    """Lines of both writers arrive in random order, in bursts of any length; their losses differ."""
    order = random.Random(seed).sample([0, 1] * (200 // burst), k=2 * (200 // burst))
    streams, found = StepStreams(), {}
    for writer, step, loss in _of_two_writers([writer for writer in order for _ in range(burst)]):
        found.setdefault(streams.attempt(None, step, None, None, loss), []).append((writer, step))

    assert len(found) <= 3
    assert _mixed(found.values()) <= 2
    assert streams.are_interleaved


@given(st.lists(st.integers(0, 1), min_size=2, max_size=60))
def test_writers_with_ids_are_separate_streams(order):
    """A restart of a writer is another attempt of this writer only."""
    streams, found = StepStreams(), {}
    for writer, step, _ in [*_of_two_writers(order), *_of_two_writers(order)]:
        found.setdefault(streams.attempt(None, step, None, f"host-{writer}"), []).append((writer, step))

    assert 0 == _mixed(found.values())
    assert sum(1 if order.count(writer) < 2 else 2 for writer in set(order)) == len(found)
