"""Tests of the rules: vectors recorded with msprobe, boundaries, and float32 and float64 arithmetic."""

import json
import math
import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.rules.evaluation import evaluate

from rankscope_contract.rules import AnomalyRule, rule_from_config
from rankscope_contract.rules.anomaly import DEFAULT_RULES, AnomalyNan, AnomalyTurbulence
from rankscope_contract.rules.curve import SeriesEvaluator, next_baseline, to_float32

VECTORS = json.loads((pathlib.Path(__file__).parent / "data" / "anomaly_vectors.json").read_text())["series"]

# Deliberate differences from msprobe, which recorded the vectors: steps at which our rules fire.
DIFFERENCES = {
    "T08": [3, 4, 5],  # a 0 never enters our baseline; in msprobe the first value after zeros is an anomaly
    "T10": [4, 5],  # a NaN never enters our baseline; in msprobe it makes the average NaN, and the rule fires no more
    "P03": [3, 4],  # a rule that does not judge `max` hides no other rule; in msprobe it hid the hit of the next rule
}

# In msprobe, a norm or a minimum may be NaN. Our statistics use finite elements only, and the NaN rule judges the
# number of NaNs, or a logged scalar. These vectors are judged as logged scalars.
JUDGED_AS_A_SCALAR = {"N01", "N02"}
finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def seed_rules(vector: dict[str, Any]) -> list[AnomalyRule]:
    """Return the rules of the vector with the meaning of msprobe, in which Inf alone is no anomaly."""
    infs = {"AnomalyNan": {"infs": False}}
    return [
        rule_from_config({**rule, "args": {**(rule.get("args") or {}), **infs.get(rule["rule_name"], {})}})
        for rule in vector["rules"]
    ]


def firings(vector: dict[str, Any]) -> list[tuple[int, str]]:
    kind, op = (None, "value") if vector["id"] in JUDGED_AS_A_SCALAR else ("grad_reduced", vector["op"])
    found = evaluate(seed_rules(vector), kind, op, [float(value) for value in vector["series"]])
    return [(firing.position, firing.rule.name) for firing in found]


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["id"] not in DIFFERENCES], ids=lambda v: v["id"])
def test_rules_fire_as_in_the_vectors_of_msprobe(vector):
    expected = list(zip(vector["alert_steps"], vector["alert_rules"], strict=True))

    assert expected == firings(vector)


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["id"] in DIFFERENCES], ids=lambda v: v["id"])
def test_rules_differ_from_msprobe_only_as_documented(vector):
    assert DIFFERENCES[vector["id"]] == [position for position, _ in firings(vector)] != vector["alert_steps"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["id"])
def test_baselines_equal_the_averages_of_msprobe_for_finite_values(vector):
    """The recorded averages are float64; our baselines are stored as float32."""
    baseline = math.nan
    for value, average in zip(vector["series"], vector["average_after"], strict=True):
        if not math.isfinite(float(value)):
            break
        baseline = next_baseline(baseline, to_float32(float(value)))

        assert average == pytest.approx(baseline, rel=1e-6, abs=1e-45)


ABOVE_HALF, BOTH = AnomalyTurbulence(threshold=0.5), AnomalyTurbulence(threshold=1.0, direction="both")


@pytest.mark.parametrize(
    ("rule", "value", "baseline", "fires"),
    [
        *((ABOVE_HALF, 1.5, 1.0, False), (ABOVE_HALF, math.nextafter(1.5, 2), 1.0, True)),
        *((ABOVE_HALF, -2.0, 1.0, True), (ABOVE_HALF, 0.001, 1.0, False), (ABOVE_HALF, 1e30, math.nan, False)),
        *((ABOVE_HALF, math.nan, 1.0, False), (BOTH, 0.5, 1.0, False), (BOTH, math.nextafter(0.5, 0), 1.0, True)),
        *((BOTH, math.nextafter(2.0, 3), 1.0, True), (BOTH, 1e30, math.nan, False), (BOTH, math.nan, 1.0, False)),
    ],
)
def test_turbulence_fires_only_outside_of_its_threshold(rule, value, baseline, fires):
    assert fires == rule.fires("norm", value, baseline)


@pytest.mark.parametrize(
    ("rules", "kind", "op", "series", "fired"),
    [
        (DEFAULT_RULES, "grad_reduced", "norm", [1.0] * 99 + [50.0], []),
        (DEFAULT_RULES, "grad_reduced", "norm", [1.0] * 100 + [50.0], [100]),
        (DEFAULT_RULES, "grad_reduced", "norm", [1.0] * 200 + [26.0], []),
        (DEFAULT_RULES, "grad_reduced", "norm", [1.5e-7] * 150 + [1.1e-5], []),  # zero except for rounding
        (DEFAULT_RULES, "grad_reduced", "norm", [1.5e-3] * 150 + [0.11], [150]),
        (DEFAULT_RULES, "grad_reduced", "norm", [*[0.0] * 199, 1.0] * 150, []),  # seldom reached
        (DEFAULT_RULES, "grad_reduced", "norm", [*[0.0] * 199, 1.0] * 100 + [-0.0, 50.0], [20001]),
        ([AnomalyTurbulence(threshold=5.0)], "act_out", "norm", [1.0, 9.0], [1]),
        ([ABOVE_HALF], "act_out", "norm", [math.nan, math.inf, 3.0, 3.0, 9.0], [4]),
        # Scalars are float64: 1e39 is a number, although a float32 statistic of that size would be Inf.
        ([AnomalyNan()], None, "value", [1e39, -1e300], []),
        ([AnomalyNan()], None, "value", [0.0, math.inf], [1]),
    ],
)
def test_positions_at_which_rules_fire(rules, kind, op, series, fired):
    assert fired == [firing.position for firing in evaluate(rules, kind, op, series)]


def test_smallest_number_of_values_counts_for_all_rules_of_a_series():
    """The rules of a series share one baseline, which is on the metrics page and in the store."""
    late, early = (AnomalyTurbulence(name=str(n), threshold=5.0, after_values=n, ops=("norm",)) for n in (9, 2))
    alone, both = SeriesEvaluator([late], "act_out", "norm"), SeriesEvaluator([late, early], "act_out", "norm")
    for evaluator in (alone, both):
        for _ in range(2):
            evaluator.observe(1.0)

    assert (True, 1.0) == (math.isnan(alone.baseline), both.baseline)
    assert late is both.observe(9.0).rule


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, True) for name in ("loss", "train/loss", "lm loss", "valLoss", "eval_losses", "grad_norm", "norm/l2")),
        *((name, False) for name in ("loss_scale", "loss/seconds", "normal", "glossary", "memory_bytes", "accuracy")),
    ],
)
def test_limit_of_the_nan_rule_applies_to_losses_and_norms(name, expected):
    rule = AnomalyNan(threshold=10.0).for_scalar(name)

    assert expected == bool(rule.fires("value", 11.0, math.nan))
    assert rule.fires("value", math.nan, math.nan)


def test_turbulence_evaluates_only_the_named_scalars():
    rule = AnomalyTurbulence(threshold=1.0, scalars=["loss"])
    fired = {
        name: [place for place, value in enumerate((1.0, 1.0, 9.0)) if evaluator.observe(value)]
        for name in ("loss", "grad_norm")
        for evaluator in [SeriesEvaluator([rule], None, "value", name)]
    }

    assert {"loss": [2], "grad_norm": []} == fired
    with pytest.raises(ValueError, match="scalars must be a list of names"):
        AnomalyTurbulence(threshold=1.0, scalars="loss")


@pytest.mark.parametrize("count", [-1, 1.5, True, "9"])
def test_invalid_number_of_values_is_rejected(count):
    with pytest.raises(ValueError, match="after_values must be an integer of at least 0"):
        AnomalyTurbulence(threshold=5.0, after_values=count)


@given(before=finite32.map(abs), value=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_non_finite_values_never_enter_a_baseline(before, value):
    assert before == next_baseline(before, value)
    assert math.isnan(next_baseline(math.nan, value))


LIMIT, WITHOUT_INFS = AnomalyNan(threshold=10.0), AnomalyNan(infs=False)
OF_OUTPUTS = AnomalyTurbulence(threshold=0.5, kinds=["act_out"])


@pytest.mark.parametrize(
    ("rule", "kind", "op", "judges"),
    [
        *((AnomalyNan(), "grad_reduced", op, op in ("nans", "infs")) for op in ("nans", "infs", "norm", "zeros")),
        (WITHOUT_INFS, "grad_reduced", "infs", False),
        (LIMIT, "param_after", "max", True),
        *((OF_OUTPUTS, kind, "norm", kind == "act_out") for kind in ("act_out", "grad_reduced")),
        (AnomalyNan(kinds=["act_out"]), None, "value", False),
    ],
)
def test_rule_judges_only_its_kinds_and_statistics(rule, kind, op, judges):
    assert judges == rule.judges(kind, op)


@pytest.mark.parametrize(
    ("rule", "op", "value", "fires"),
    [
        *((AnomalyNan(), "nans", 1, True), (AnomalyNan(), "infs", 0, False)),
        *((WITHOUT_INFS, "value", math.inf, False), (WITHOUT_INFS, "value", math.nan, True)),
        *((LIMIT, "max", -10.0, False), (LIMIT, "max", -10.5, True)),
    ],
)
def test_nan_rule_fires_for_counts_and_magnitudes_above_its_threshold(rule, op, value, fires):
    assert fires == rule.fires(op, value, math.nan)


@pytest.mark.parametrize("rule", [AnomalyNan, AnomalyTurbulence])
@pytest.mark.parametrize("threshold", [pytest.param(10**400, id="huge"), math.nan, "0.5", True, [1.0]])
def test_invalid_threshold_is_rejected(rule, threshold):
    with pytest.raises(ValueError, match=f"{rule.__name__}: threshold must be a number, not "):
        rule(threshold=threshold)


def test_first_applicable_rule_is_the_rule_of_the_firing():
    turbulence, limit = AnomalyTurbulence(threshold=0.5), AnomalyNan(threshold=5.0)
    series = [1.0, 1.0, 6.0]

    assert [turbulence] == [f.rule for f in evaluate([turbulence, limit], "grad_reduced", "norm", series)]
    assert [limit] == [f.rule for f in evaluate([limit, turbulence], "grad_reduced", "norm", series)]
    assert [limit] == [f.rule for f in evaluate([turbulence, limit], "grad_reduced", "max", series)]


def test_firing_contains_the_baseline_before_the_observation():
    (firing,) = evaluate([AnomalyTurbulence(threshold=0.5)], "grad_reduced", "norm", [1.0, 1.0, 2.0])

    assert (2, 2.0, 1.0) == (firing.position, firing.value, firing.baseline)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"rule_name": "AnomalyTurbulance"}, ["AnomalyTurbulance", "Did you mean 'AnomalyTurbulence'"]),
        ({}, ["unknown rule", "AnomalyNan"]),
        ({"rule_name": "AnomalyTurbulence", "args": {"treshold": 1}}, ["treshold", "threshold"]),
        ({"rule_name": "AnomalyTurbulence"}, ["threshold"]),
        ({"rule_name": "AnomalyTurbulence", "args": {"threshold": 0}}, ["above 0"]),
        ({"rule_name": "AnomalyTurbulence", "args": {"threshold": 1, "ops": ["min"]}}, ["norm, mean", "min"]),
        ({"rule_name": "AnomalyTurbulence", "args": {"threshold": 1, "direction": "down"}}, ["'up' or 'both'"]),
    ],
)
def test_invalid_rule_is_rejected_with_the_allowed_values(entry, words):
    with pytest.raises(ValueError) as caught:
        rule_from_config(entry)

    assert all(word in str(caught.value) for word in words)
