"""Tests of the rules: vectors recorded with msprobe, boundaries, and float32 and float64 arithmetic."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract.rules import AnomalyRule, rule_classes, rule_from_config
from rankscope_contract.rules.curve import SeriesEvaluator, evaluate, next_baseline, to_float32
from rankscope_contract.rules.defaults import DEFAULT_RULES
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence

VECTORS = json.loads((pathlib.Path(__file__).parent / "data" / "anomaly_vectors.json").read_text())["series"]

# Deliberate differences from msprobe, which recorded the vectors: (steps at which our rules fire, reason).
DIFFERENCES = {
    "T10": (
        [4, 5],
        "a NaN never enters our baseline; in msprobe it makes the average NaN, and the rule never fires again",
    ),
    "P03": (
        [3, 4],
        "a rule that does not judge `max` hides no other rule; in msprobe its discarded hit hid the next rule's hit",
    ),
}

# In msprobe, a norm or a minimum may be NaN. Our statistics use finite elements only, and the NaN rule judges the
# number of NaNs, or a logged scalar. These vectors are judged as logged scalars.
JUDGED_AS_A_SCALAR = {"N01", "N02"}

finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
any32 = st.floats(width=32)


def seed_rules(vector: dict[str, Any]) -> list[AnomalyRule]:
    """Return the rules of the vector with the meaning of msprobe, in which Inf alone is no anomaly."""
    entries = []
    for entry in vector["rules"]:
        arguments = dict(entry.get("args") or {})
        if entry["rule_name"] == "AnomalyNan":
            arguments["infs"] = False
        entries.append({"rule_name": entry["rule_name"], "args": arguments})
    return [rule_from_config(entry) for entry in entries]


def firings(vector: dict[str, Any]) -> list[tuple[int, str]]:
    scalar = vector["id"] in JUDGED_AS_A_SCALAR
    kind, op = (None, "value") if scalar else ("grad_reduced", vector["op"])
    found = evaluate(seed_rules(vector), kind, op, [float(value) for value in vector["series"]])
    return [(firing.position, firing.rule.name) for firing in found]


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["id"] not in DIFFERENCES], ids=lambda v: v["id"])
def test_rules_fire_as_in_the_vectors_of_msprobe(vector):
    expected = list(zip(vector["alert_steps"], vector["alert_rules"], strict=True))

    assert expected == firings(vector)


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["id"] in DIFFERENCES], ids=lambda v: v["id"])
def test_rules_differ_from_msprobe_only_as_documented(vector):
    ours, _reason = DIFFERENCES[vector["id"]]

    assert ours == [position for position, _ in firings(vector)]
    assert ours != vector["alert_steps"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["id"])
def test_baselines_equal_the_averages_of_msprobe_for_finite_values(vector):
    """The recorded averages are float64; our baselines are stored as float32."""
    baseline = math.nan
    for value, average in zip(vector["series"], vector["average_after"], strict=True):
        if not math.isfinite(float(value)):
            break
        baseline = next_baseline(baseline, to_float32(float(value)))

        assert average == pytest.approx(baseline, rel=1e-6, abs=1e-45)


def test_turbulence_fires_only_above_its_threshold():
    rule = AnomalyTurbulence(threshold=0.5)

    assert not rule.fires("norm", 1.5, 1.0)
    assert rule.fires("norm", math.nextafter(1.5, 2), 1.0)
    assert rule.fires("mean", -2.0, 1.0)
    assert not rule.fires("norm", 0.001, 1.0)


def test_turbulence_with_direction_both_also_fires_on_a_decrease():
    rule = AnomalyTurbulence(threshold=1.0, direction="both")

    assert not rule.fires("norm", 0.5, 1.0)
    assert rule.fires("norm", math.nextafter(0.5, 0), 1.0)
    assert rule.fires("norm", math.nextafter(2.0, 3), 1.0)


def test_turbulence_does_not_fire_without_value_or_baseline():
    for direction in ("up", "both"):
        rule = AnomalyTurbulence(threshold=0.5, direction=direction)

        assert not rule.fires("norm", 1e30, math.nan)
        assert not rule.fires("norm", math.nan, 1.0)


@pytest.mark.parametrize(("values", "expected"), [(99, []), (100, [100])])
def test_default_turbulence_fires_from_the_101st_value_on(values, expected):
    series = [1.0] * values + [50.0]

    assert expected == [f.position for f in evaluate(DEFAULT_RULES, "grad_reduced", "norm", series)]
    assert [] == list(evaluate(DEFAULT_RULES, "grad_reduced", "norm", [1.0] * 200 + [26.0]))


def test_explicit_turbulence_threshold_fires_from_the_second_value_on():
    assert [1] == [f.position for f in evaluate([AnomalyTurbulence(threshold=5.0)], "act_out", "norm", [1.0, 9.0])]


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
        name: [firing.position for value in (1.0, 1.0, 9.0) if (firing := evaluator.observe(value))]
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


def test_turbulence_does_not_fire_at_the_first_finite_value():
    rules = [AnomalyTurbulence(threshold=0.5)]

    assert [4] == [f.position for f in evaluate(rules, "act_out", "norm", [math.nan, math.inf, 3.0, 3.0, 9.0])]


@given(before=finite32.map(abs), value=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_non_finite_values_never_enter_a_baseline(before, value):
    assert before == next_baseline(before, value)
    assert math.isnan(next_baseline(math.nan, value))


@given(series=st.lists(any32, min_size=1, max_size=30))
def test_baseline_is_between_the_extreme_magnitudes_of_its_values(series):
    baseline = math.nan
    for value in series:
        baseline = next_baseline(baseline, value)
    seen = [abs(value) for value in series if math.isfinite(value)]

    if not seen:
        assert math.isnan(baseline)
    else:
        # Rounding to float32 may move the baseline past an extreme by at most one unit in the last place.
        assert min(seen) * (1 - 2**-23) <= baseline <= max(seen) * (1 + 2**-23)
        assert to_float32(baseline) == baseline


def test_nan_rule_on_counts_of_a_tensor():
    rule = AnomalyNan()

    assert rule.judges("grad_reduced", "nans")
    assert rule.judges("grad_reduced", "infs")
    assert not rule.judges("grad_reduced", "norm")
    assert not rule.judges("grad_reduced", "zeros")
    assert rule.fires("nans", 1, math.nan)
    assert not rule.fires("infs", 0, math.nan)


def test_nan_rule_without_infs_ignores_infinities():
    rule = AnomalyNan(infs=False)

    assert not rule.judges("grad_reduced", "infs")
    assert not rule.fires("value", math.inf, math.nan)
    assert rule.fires("value", math.nan, math.nan)


@pytest.mark.parametrize("rule", [AnomalyNan, AnomalyTurbulence])
@pytest.mark.parametrize("threshold", [pytest.param(10**400, id="huge"), math.nan, "0.5", True, [1.0]])
def test_invalid_threshold_is_rejected(rule, threshold):
    with pytest.raises(ValueError, match=f"{rule.__name__}: threshold must be a number, not "):
        rule(threshold=threshold)


def test_nan_rule_fires_only_for_magnitudes_above_its_threshold():
    rule = AnomalyNan(threshold=10.0)

    assert rule.judges("param_after", "max")
    assert not rule.fires("max", -10.0, math.nan)
    assert rule.fires("max", -10.5, math.nan)


def test_scalar_is_judged_as_float64():
    """Scalars are float64: 1e39 is a number, although a float32 statistic of that size would be Inf."""
    rules = [AnomalyNan()]

    assert [] == list(evaluate(rules, None, "value", [1e39, -1e300]))
    assert [1] == [firing.position for firing in evaluate(rules, None, "value", [0.0, math.inf])]


def test_first_applicable_rule_is_the_rule_of_the_firing():
    turbulence, limit = AnomalyTurbulence(threshold=0.5), AnomalyNan(threshold=5.0)
    series = [1.0, 1.0, 6.0]

    assert [turbulence] == [f.rule for f in evaluate([turbulence, limit], "grad_reduced", "norm", series)]
    assert [limit] == [f.rule for f in evaluate([limit, turbulence], "grad_reduced", "norm", series)]
    assert [limit] == [f.rule for f in evaluate([turbulence, limit], "grad_reduced", "max", series)]


def test_rule_judges_only_its_kinds():
    rule = AnomalyTurbulence(threshold=0.5, kinds=["act_out"])

    assert ("act_out",) == rule.kinds
    assert rule.judges("act_out", "norm")
    assert not rule.judges("grad_reduced", "norm")
    assert not AnomalyNan(kinds=["act_out"]).judges(None, "value")


def test_firing_contains_the_baseline_before_the_observation():
    (firing,) = evaluate([AnomalyTurbulence(threshold=0.5)], "grad_reduced", "norm", [1.0, 1.0, 2.0])

    assert (2, 2.0, 1.0) == (firing.position, firing.value, firing.baseline)


@given(series=st.lists(any32, max_size=40), cut=st.integers(0, 40))
def test_series_judged_in_parts_has_the_same_firings(series, cut):
    rules = [AnomalyNan(threshold=100.0), AnomalyTurbulence(threshold=0.5, direction="both")]
    evaluator = SeriesEvaluator(rules, "grad_reduced", "norm")
    observed = [evaluator.observe(value) for part in (series[:cut], series[cut:]) for value in part]

    assert repr(list(evaluate(rules, "grad_reduced", "norm", series))) == repr([f for f in observed if f])


def test_norm_that_is_zero_except_for_rounding_is_not_blamed():
    bias_before_batch_norm, bias = [1.5e-7] * 150 + [1.1e-5], [1.5e-3] * 150 + [0.11]

    assert [] == list(evaluate(DEFAULT_RULES, "grad_reduced", "norm", bias_before_batch_norm))
    assert [150] == [firing.position for firing in evaluate(DEFAULT_RULES, "grad_reduced", "norm", bias)]


def test_rules_have_the_names_of_their_classes():
    assert {"AnomalyNan", "AnomalyTurbulence"} <= set(rule_classes())
    assert "AnomalyTurbulence" == rule_from_config({"rule_name": "AnomalyTurbulence", "args": {"threshold": 1}}).name


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


@given(value=st.floats())
def test_rounding_to_float32_keeps_sign_infinity_and_nan(value):
    rounded = to_float32(value)

    if math.isnan(value):
        assert math.isnan(rounded)
    else:
        assert math.copysign(1, value) == math.copysign(1, rounded)
        assert to_float32(rounded) == rounded
