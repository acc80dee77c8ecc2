"""The vectorised detector gives the same result for every series as the contract's reference evaluator."""

import math
import struct

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.rules.evaluation import evaluate
from tests.properties import examples

from rankscope_contract.model.kinds import COUNT_OPS, JUDGED_OPS, VALUE_OPS
from rankscope_contract.model.schema import PlanEntry
from rankscope_contract.rules.anomaly import AnomalyNan, AnomalyTurbulence
from rankscope_contract.rules.curve import needed_values, next_baseline, to_float32
from rankscope_exporter.publish.anomaly_detector import AnomalyDetector
from rankscope_exporter.records.plan import Finished

KINDS = ("act_out", "grad_reduced", "param_after")
NULL = math.nan

value32 = st.one_of(
    st.sampled_from([NULL, math.inf, -math.inf, 0.0, -0.0, 1.0, 1.5, -2.0, 3.4e38]),
    st.floats(-100, 100, width=32),
    st.floats(width=32),
)
count = st.sampled_from([0, 0, 0, 1, 7, 2**33])
threshold = st.sampled_from([0.5, 1.0]) | st.floats(1e-3, 1e3)
some_kinds = st.none() | st.lists(st.sampled_from(KINDS), max_size=2).map(tuple)
turbulence = st.builds(
    AnomalyTurbulence,
    threshold=threshold,
    direction=st.sampled_from(["up", "both"]),
    ops=st.sampled_from([("norm", "mean"), ("norm",), ("mean",)]),
    kinds=some_kinds,
    after_values=st.sampled_from([0, 0, 1, 3]),
    name=st.uuids().map(str),
)
nan = st.builds(
    AnomalyNan, threshold=st.none() | threshold, infs=st.booleans(), kinds=some_kinds, name=st.uuids().map(str)
)
observation = st.tuples(st.booleans(), st.tuples(*[value32] * len(VALUE_OPS)), st.tuples(count, count))


@st.composite
def stories(draw):
    """Return rules, the kinds of some entries, and the observations of each entry at each step."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    rules = draw(st.lists(turbulence | nan, max_size=4))
    return rules, kinds, draw(st.lists(st.tuples(*[observation] * len(kinds)), min_size=1, max_size=8))


def finished(step) -> Finished:
    """Return the observations of one step in the form of the statistics."""
    present = np.array([seen for seen, _, _ in step])
    values = np.array([values for _, values, _ in step], np.float32).T
    counts = np.zeros((len(COUNT_OPS), len(step)), np.int64)
    counts[:2] = np.array([counts for _, _, counts in step]).T
    return Finished(np.where(present, values, np.float32(math.nan)), np.where(present, counts, 0), present)


def plan(kinds):
    return [PlanEntry(kind=kind, tensor=f"t{number}") for number, kind in enumerate(kinds)]


def bits(number: float | None) -> bytes:
    return struct.pack("<d", math.nan if number is None else number)


def one_entry(rules, observations):
    """Return the verdict on each step of a single gradient."""
    detector = AnomalyDetector(rules, plan(["grad_reduced"]))
    return [detector.observe(finished([observed])) for observed in observations]


def norm_of(value, *, nans=0, infs=0, present=True):
    return present, (value, *[NULL] * (len(VALUE_OPS) - 1)), (nans, infs)


def expected_firings(rules, kinds, steps):
    """Return the results of the reference evaluator: {(step, entry, op): (rule, value, baseline)}."""
    firings = {}
    for entry, kind in enumerate(kinds):
        seen = [(number, step[entry]) for number, step in enumerate(steps) if step[entry][0]]
        for place, op in enumerate(("nans", "infs")):
            for firing in evaluate(rules, kind, op, [float(counts[place]) for _, (_, _, counts) in seen]):
                step = seen[firing.position][0]
                if (step, entry, "nans") not in firings:  # one firing for the non-finite elements of an entry
                    firings[step, entry, op] = (firing.rule, firing.value, math.nan)
        for place, op in enumerate(VALUE_OPS):
            series = [(step, values[place]) for step, (_, values, _) in seen if not math.isnan(values[place])]
            for firing in evaluate(rules, kind, op, [value for _, value in series]):
                baseline = firing.baseline if op in JUDGED_OPS else math.nan
                firings[series[firing.position][0], entry, op] = (firing.rule, firing.value, baseline)
    return firings


@settings(max_examples=examples(100), deadline=None)
@given(stories())
def test_firings_equal_the_reference_evaluator(story):
    rules, kinds, steps = story
    detector = AnomalyDetector(rules, plan(kinds), limit=1000)
    found = {}
    for number, step in enumerate(steps):
        for firing in detector.observe(finished(step)).firings:
            found[number, firing.entry, firing.op] = (firing.rule, bits(firing.value), bits(firing.baseline))

    expected = expected_firings(rules, kinds, steps)
    assert found == {at: (rule, *map(bits, numbers)) for at, (rule, *numbers) in expected.items()}


@settings(max_examples=examples(100), deadline=None)
@given(stories())
def test_baselines_equal_the_reference_evaluator(story):
    rules, kinds, steps = story
    detector = AnomalyDetector(rules, plan(kinds))
    own = {(op, entry): math.nan for op in JUDGED_OPS for entry in range(len(kinds))}
    seen = dict.fromkeys(own, 0)
    for step in steps:
        shown = detector.observe(finished(step)).baselines
        for (op, entry), before in own.items():
            present, values, _ = step[entry]
            value = values[VALUE_OPS.index(op)]
            expected = math.nan
            if present:
                own[op, entry] = after = next_baseline(before, to_float32(value)) if value else before
                if seen[op, entry] >= needed_values(rules, kinds[entry], op):
                    expected = after if math.isnan(before) else before
                seen[op, entry] += math.isfinite(value) and value != 0

            assert bits(expected) == bits(float(shown[JUDGED_OPS.index(op), entry]))


def test_infinite_values_and_large_thresholds_never_raise():
    steps = [norm_of(1.0), norm_of(math.inf), norm_of(3.4e38), norm_of(NULL)]
    with np.errstate(all="raise"):
        judged = one_entry([AnomalyTurbulence(threshold=1e300), AnomalyNan(threshold=10**300)], steps)

    assert [0, 1, 0, 0] == [len(judgement.firings) for judgement in judged]


def test_firings_are_ordered_limited_and_counted():
    detector = AnomalyDetector([AnomalyNan(threshold=1.0)], plan(["act_out"] * 50), limit=5)
    judgement = detector.observe(finished([norm_of(5.0, nans=1)] * 50))

    ordered = [(0, "nans"), (0, "norm"), (1, "nans"), (1, "norm"), (2, "nans")]
    assert ordered == [(firing.entry, firing.op) for firing in judgement.firings]
    assert 95 == judgement.left_out


def test_infinities_from_the_first_value_on_are_intended_and_named_once():
    """More of them in a parameter, and those of a gradient, are an anomaly."""
    kinds, told = ["param_before", "act_out", "grad_reduced", "param_after"], []
    detector = AnomalyDetector([AnomalyNan()], plan(kinds), tell=told.append)
    seen = [[(6, 0), (6, 0), (0, 0), (6, 0)], [(6, 0), (9, 0), (1, 0), (7, 0)], [(5, 0), (0, 1), (0, 0), (6, 0)]]
    firing = []
    for step in seen:
        judgement = detector.observe(finished([norm_of(1.0, infs=infs, nans=nans) for infs, nans in step]))
        firing.append([(kinds[one.entry], one.op, one.value) for one in judgement.firings])

    assert [[], [("grad_reduced", "infs", 1), ("param_after", "infs", 7)], [("act_out", "nans", 1)]] == firing
    assert 1 == len(told)


def test_more_infinities_in_a_frozen_parameter_are_an_anomaly_once():
    kinds = ["param_after", "param_after", "grad_reduced", "act_out"]
    detector = AnomalyDetector([AnomalyNan()], tell=[].append)
    detector.follow(plan(kinds), owners=[0, 1, 1, -1])
    seen = [(0, 2), (1, 2), (3, 3), (3, 3), (0, 2), (2, 2)]  # infinities of the frozen and of the trained parameter
    steps = [[norm_of(1.0, infs=infs) for infs in (*both, 0, 0)] for both in seen]
    fired = [[firing.entry for firing in detector.observe(finished(step)).firings] for step in steps]

    assert [[], [0], [0, 1], [1], [], [0]] == fired


def test_limit_keeps_the_first_cause_of_micro_batches():
    """A NaN that begins in an activation of the first micro-batch is in all later tensors."""
    order = [("param_before", None), ("act_out", 0), ("act_grad_out", 0), ("act_out", 1), ("grad_unreduced", None)]
    entries = [PlanEntry(kind=kind, tensor="t", micro_step=micro_step) for kind, micro_step in reversed(order)]
    judgement = AnomalyDetector([AnomalyNan()], entries, limit=4).observe(finished([norm_of(5.0, nans=1)] * 5))
    told = [(entries[firing.entry].kind, entries[firing.entry].micro_step) for firing in judgement.firings]

    assert order[:4] == told


def test_firing_pairs_include_rules_beyond_the_limit():
    rules = [AnomalyTurbulence(threshold=0.5), AnomalyNan(threshold=5.0, kinds=["grad_reduced", "act_out"])]
    detector = AnomalyDetector(rules, plan(["act_out", "grad_reduced", "param_after"]), limit=1)
    detector.observe(finished([norm_of(1.0)] * 3))
    judgement = detector.observe(finished([norm_of(1.0), norm_of(6.0), norm_of(2.0)]))

    # AnomalyTurbulence names the event of the gradient. The limit rule holds as well, as in PromQL.
    pairs = {("AnomalyTurbulence", kind) for kind in ("grad_reduced", "param_after")}
    assert pairs | {("AnomalyNan", "grad_reduced")} == judgement.firing
    assert ["AnomalyTurbulence"] == [firing.rule.name for firing in judgement.firings]


def test_scalars_are_evaluated_by_scalar_rules_with_a_baseline_per_label():
    detector = AnomalyDetector([AnomalyTurbulence(threshold=0.5), AnomalyNan()], [])
    firings = [detector.check_scalar("loss", value) for value in (1.0, 100.0, math.nan, -math.inf)]
    labelled = AnomalyDetector([AnomalyTurbulence(threshold=0.5, scalars=("loss",))], [])
    values = [("a", 1.0), ("b", 9.0), ("a", 1.0), ("b", 9.0), ("a", 2.0)]

    assert [None, None, "AnomalyNan", "AnomalyNan"] == [firing and firing.rule.name for firing in firings]
    assert [False] * 4 + [True] == [labelled.check_scalar("loss", value, label) is not None for label, value in values]


def test_verdict_is_not_changed_by_later_steps():
    first, _ = one_entry([], [norm_of(1.0), norm_of(100.0)])

    assert 1.0 == float(first.baselines[0, 0])
