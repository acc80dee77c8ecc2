"""The latest values that are taken from a sequence of records."""

from __future__ import annotations

import math

import pytest

from rankscope_contract.model.events import Event, EventType
from rankscope_contract.model.schema import PlanEntry
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_exporter.records.step_record import Scalar, StepRecord
from rankscope_exporter.serving.latest_values import MAX_ANOMALY_SERIES, MAX_SCALAR_SERIES, LatestValues

NAN = AnomalyNan()
TURBULENCE = AnomalyTurbulence(threshold=3.0, kinds=("grad_reduced",))
GRADIENT = PlanEntry(kind="grad_reduced", tensor="a")
ACTIVATION = PlanEntry(kind="act_out", tensor="a")
ONE = ({"norm": 1.0},)


@pytest.fixture
def live():
    return LatestValues([NAN, TURBULENCE])


def _anomaly(rule="AnomalyNan", kind="grad_reduced", tensor="a", op="nans"):
    return Event(type=EventType.ANOMALY, rule=rule, kind=kind, tensor=tensor, op=op)


def test_counters_of_a_planned_or_announced_kind_start_at_zero(live, record):
    live.update(record(0, [ACTIVATION], ONE))
    live.announce(["grad_reduced"])

    pairs = [("AnomalyNan", ""), ("AnomalyNan", "act_out"), ("AnomalyNan", "grad_reduced")]
    assert dict.fromkeys([*pairs, ("AnomalyTurbulence", "grad_reduced")], 0) == live.snapshot().anomalies


def feature(module, value, index=None, kind="attention_entropy"):
    return {"kind": kind, "module": module, "index": index, "value": value}


def test_features_have_the_bounds_of_each_module_and_a_nan_is_both(live, record):
    rows = (feature("a", 2.0, 0), feature("a", 0.5, 1), feature("b", math.nan), feature("b", 1.0))
    live.update(record(0, features=rows))
    live.update(record(1, features=(feature("c", 7.0, kind="stable_rank"), feature("c", None, kind="stable_rank"))))
    values = live.snapshot().features

    assert (0.5, 2.0) == tuple(values["attention_entropy", "a", op] for op in ("min", "max"))
    assert (7.0, 7.0) == tuple(values["stable_rank", "c", op] for op in ("min", "max"))
    assert math.isnan(values["attention_entropy", "b", "min"] + values["attention_entropy", "b", "max"])


def test_firings_are_counted_by_kind_and_by_series(live, record):
    live.update(record(0, events=(_anomaly(), _anomaly(op="infs"), Event(type="note", rule="AnomalyNan"))))
    live.update(record(1, events=(_anomaly(),)))
    snapshot = live.snapshot()

    assert 3 == snapshot.anomalies["AnomalyNan", "grad_reduced"]
    series = {("AnomalyNan", "grad_reduced", "a", op): count for op, count in (("nans", 2), ("infs", 1))}
    assert series == snapshot.anomaly_series


def test_firings_above_the_series_limit_count_as_other(live, record):
    for number in range(MAX_ANOMALY_SERIES + 30):
        live.update(record(0, events=(_anomaly(tensor=f"t{number}"),)))
    live.update(record(0, events=(_anomaly(tensor="t0"),)))
    series = live.snapshot().anomaly_series

    assert 30 == series["AnomalyNan", "grad_reduced", "_other", "nans"]
    assert 2 == series["AnomalyNan", "grad_reduced", "t0", "nans"]
    assert MAX_ANOMALY_SERIES + 1 == len(series)


def test_rule_fires_until_its_kind_is_evaluated_again(live, record):
    """A record of hardware metrics, between steps, evaluates no rule of scalars."""
    gradient, scalar = ("AnomalyNan", "grad_reduced"), ("AnomalyNan", "")
    nan = (Scalar("loss", math.nan),)
    live.update(record(0, [GRADIENT], ONE, firing=frozenset({gradient, scalar}), scalars=nan))
    live.update(record(1, [ACTIVATION], ONE))
    live.update(StepRecord(ts=0, scalars=(Scalar("gpu_power_watts", 1.0),)))
    shown = [live.snapshot().firing]
    for more in ({"scalars": (Scalar("loss", 1.0),)}, {"entries": [GRADIENT], "rows": ONE}):
        live.update(record(2, **more))
        shown.append(live.snapshot().firing)

    assert [(True, True), (True, False), (False, False)] == [(firing[gradient], firing[scalar]) for firing in shown]


def test_each_kind_has_the_values_of_its_latest_record(live, record):
    live.update(record(9, [GRADIENT, ACTIVATION], ONE * 2))
    live.update(record(5, [GRADIENT], ONE))  # a step may decrease
    live.update(record(6, scalars=(Scalar("loss", 1.0),)))
    snapshot = live.snapshot()

    wanted = {(5, frozenset({"grad_reduced"})), (9, frozenset({"act_out"}))}
    assert wanted == {(sampled.step, sampled.kinds) for sampled in snapshot.tensors}
    assert 6 == snapshot.step


def test_scalars_have_their_latest_value_and_a_limited_number_of_series(live, record):
    live.update(record(0, scalars=(Scalar("loss", 1.0, labels={"loss": "lm"}), Scalar("loss", 2.0))))
    live.update(record(1, scalars=(Scalar("loss", math.nan),)))
    values = {key: scalar.value for key, scalar in live.snapshot().scalars.items()}

    assert 1.0 == values["loss", (("loss", "lm"),)]
    assert math.isnan(values["loss", ()])

    for step in range(MAX_SCALAR_SERIES + 3):
        live.update(record(step, scalars=(Scalar(f"loss at {step}", 1.0),)))
    snapshot = live.snapshot()
    assert (MAX_SCALAR_SERIES, 5) == (len(snapshot.scalars), snapshot.scalars_left_out)
