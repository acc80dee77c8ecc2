"""What each alert must do: series as ranks and service show them, and the alerts that must stand at which moment."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankscope_contract.evaluate import SeriesEvaluator, to_float32
from rankscope_contract.events import RunState
from rankscope_contract.rules import rule_from_config
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_dashboards.alerts import RUNBOOKS
from rankscope_dashboards.rules import DEFAULT_RULES, alert_groups

VECTORS = json.loads((Path(__file__).parents[1] / "contract/data/anomaly_vectors.json").read_text())["series"]
SCALAR_VECTORS = {"N01", "N02"}  # values that are NaN themselves: logged numbers, since statistics are over finite ones
SECONDS = 10  # between two samples, and between two evaluations

RANK = {"run": "r", "rank": "0"}
OF_W = {**RANK, "kind": "grad_unreduced", "tensor": "w"}
NORM = {**OF_W, "op": "norm"}
NAN_KIND = {**RANK, "rule": "AnomalyNan", "kind": "exp_avg"}
SERVICE = {"job": "rankscope-service", "instance": "127.0.0.1:9470"}


def series(metric, **labels):
    return metric + "{" + ", ".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def written(value):
    return "NaN" if math.isnan(value) else f"{value:+}".title() if math.isinf(value) else repr(value)


def without(labels, *names):
    return {name: value for name, value in labels.items() if name not in names}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Series with their values in promtool's notation, and the alerts that stand at each sample looked at."""

    alert: str
    what: str
    given: Mapping[str, str]
    expected: Mapping[int, Sequence[Mapping[str, str]]]
    rules: Sequence = field(default=DEFAULT_RULES)

    def document(self):
        checks = [
            {"eval_time": f"{SECONDS * at}s", "alertname": self.alert, "exp_alerts": [self.told(one) for one in alerts]}
            for at, alerts in self.expected.items()
        ]
        given = [{"series": name, "values": values} for name, values in self.given.items()]
        return {"name": self.what, "interval": f"{SECONDS}s", "input_series": given, "alert_rule_test": checks}

    def told(self, labels):
        """Return the alert as people see it: our labels, and the texts with the labels in their places."""
        alerts = [alert for group in alert_groups(self.rules) for alert in group.alerts if alert.name == self.alert]
        alert = next(one for one in alerts if one.labels.get("judged_by") == labels.get("judged_by"))
        whole = {**labels, **alert.all_labels()}
        # What is looked up finds nothing in these series, and must then leave nothing behind.
        texts = {name: filled_in(text, whole) for name, text in alert.annotations(RUNBOOKS).items()}
        return {"exp_labels": whole, "exp_annotations": texts}


def filled_in(text, labels):
    """Return an annotation as Prometheus makes it of its template."""
    choice = r"\{\{ if \$labels\.(\w+) \}\}(.*?)\{\{ else \}\}(.*?)\{\{ end \}\}"
    text = re.sub(choice, lambda found: found[2] if labels.get(found[1]) else found[3], text)
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels.get(found[1], ""), text)


def test_file(scenarios):
    """Return the scenarios as one of promtool's files: in one test where they can, since each test makes a storage."""
    packed, single = _packable(scenarios)
    tests = [*([_side_by_side(packed)] if packed else []), *(scenario.document() for scenario in single)]
    return {"evaluation_interval": f"{SECONDS}s", "tests": tests}


def values_above_zero(expression, scenarios):
    """Return the scenarios as tests that `expression` leaves nothing over that is not above zero, NaN included."""
    packed, single = _packable(scenarios)
    tests = [*([_side_by_side(packed)] if packed else []), *(scenario.document() for scenario in single)]
    never = f"({expression}) unless (({expression}) > 0)"
    times = sorted({at for scenario in scenarios for at in scenario.expected})
    checks = [{"expr": never, "eval_time": f"{SECONDS * at}s", "exp_samples": []} for at in times]
    looked_at = [{**test, "alert_rule_test": [], "promql_expr_test": checks} for test in tests]
    return {"evaluation_interval": f"{SECONDS}s", "tests": looked_at}


def _packable(scenarios):
    """Return the scenarios whose series all have a run, and the others."""
    packed = [scenario for scenario in scenarios if all('run="' in name for name in scenario.given)]
    return packed, [scenario for scenario in scenarios if scenario not in packed]


def _side_by_side(scenarios):
    """Return one test, in which each scenario has runs of its own and looks at the alerts of these alone."""
    given, checks = [], []
    for number, scenario in enumerate(scenarios):
        own = {re.sub('run="', f'run="{number}.', name): values for name, values in scenario.given.items()}
        given += [{"series": name, "values": values} for name, values in own.items()]
        firing = f'ALERTS{{alertname="{scenario.alert}", alertstate="firing", run=~"{number}[.].*"}}'
        for at, alerts in scenario.expected.items():
            labels = [scenario.told({**one, "run": f"{number}.{one['run']}"})["exp_labels"] for one in alerts]
            told = [series("ALERTS", alertname=scenario.alert, alertstate="firing", **one) for one in labels]
            samples = [{"labels": name, "value": 1} for name in told]
            checks.append({"expr": firing, "eval_time": f"{SECONDS * at}s", "exp_samples": samples})
    return {"interval": f"{SECONDS}s", "input_series": given, "promql_expr_test": checks}


# What a rank shows of one judged series.


def page(values, baselines="1x30", thresholds="0.5x30", **labels):
    tensor = {**NORM, **labels}
    return {
        series("rankscope_tensor_value", **tensor): values,
        series("rankscope_tensor_baseline", **tensor): baselines,
        series("rankscope_rule_threshold", run="r", rank=tensor["rank"], rule="AnomalyTurbulence"): thresholds,
    }


def turbulence():
    def scenario(what, given, expected, rules=DEFAULT_RULES):
        return Scenario(alert="AnomalyTurbulence", what=what, given=given, expected=expected, rules=rules)

    both = [AnomalyTurbulence(threshold=0.5, direction="both", ops=("norm", "mean"))]
    yield scenario("exactly the threshold is quiet, a hair above fires", page("1.5 1.5000001"), {0: [], 1: [NORM]})
    yield scenario("a dip is bridged for a minute, then it resolves", page("9 1x20"), {0: [NORM], 5: [NORM], 9: []})
    yield scenario("a fall is no matter of the default", page("0.1"), {0: []})
    yield scenario("infinity is above, NaN is not", page("NaN Inf"), {0: [], 1: [NORM]})
    yield scenario("no threshold, no alert", page("9", thresholds="NaN"), {0: []})
    yield scenario("a baseline of nothing", page("0 9", baselines="NaN NaN"), {0: [], 1: []})
    yield scenario("zero against zero is quiet, anything else fires", page("0 1", baselines="0 0"), {0: [], 1: [NORM]})
    yield scenario("a kind that is not judged", page("9", kind="exp_avg"), {0: []})
    yield scenario("a reduced gradient", page("9", kind="grad_reduced"), {0: [{**NORM, "kind": "grad_reduced"}]})
    yield scenario("a statistic that is not judged", page("9", op="mean"), {0: []})
    ranks = page("2", thresholds="0.5") | page("2", thresholds="3", rank="1")
    yield scenario("each rank has its own threshold", ranks, {0: [NORM]})
    tensors = page("2", baselines="1") | page("2", baselines="3", tensor="v")
    yield scenario("each tensor has its own baseline", tensors, {0: [NORM]})
    gone = page("9 _ stale", baselines="1 _ stale")
    yield scenario("a tensor that left the page", gone, {0: [NORM], 9: []})
    mean = {**NORM, "op": "mean"}
    yield scenario("magnitude counts", page("-2", op="mean"), {0: [mean]}, both)
    fall = page("0.5 0.4999999", thresholds="1 1")
    yield scenario("a fall, where both directions are judged", fall, {0: [], 1: [NORM]}, both)
    yield scenario("a rise, where both directions are judged", page("1.5 1.6"), {0: [], 1: [NORM]}, both)


def nan():
    def scenario(what, given, expected, rules=DEFAULT_RULES):
        return Scenario(alert="AnomalyNan", what=what, given=given, expected=expected, rules=rules)

    for op in ("nans", "infs"):
        count = series("rankscope_tensor_value", **OF_W, op=op)
        yield scenario(f"one of {op}", {count: "0 1 0x20"}, {0: [], 1: [{**OF_W, "op": op}], 9: []})
    norm = series("rankscope_tensor_value", **NORM)
    yield scenario(
        "a statistic is over finite elements: it is not judged", {norm: "NaN Inf 9e30"}, {0: [], 1: [], 2: []}
    )
    scalars = {
        "rankscope_loss": {"loss": "lm"},
        "rankscope_grad_norm": {},
        "rankscope_learning_rate": {"group": "0"},
        "rankscope_scalar": {"name": "z"},
    }
    for metric, labels in scalars.items():
        for value in ("NaN", "Inf", "-Inf"):
            given = {series(metric, **RANK, **labels): f"2.5 {value} 2.5x20"}
            yield scenario(f"{metric} is {value}, and recovers", given, {0: [], 1: [RANK], 6: [RANK], 9: []})
    yield scenario("a logged number that is not logged any more", {series("rankscope_loss", **RANK): "stale"}, {0: []})
    limited = [AnomalyNan(threshold=1000.0)]
    limit = {series("rankscope_rule_threshold", **RANK, rule="AnomalyNan"): "1000x9"}
    yield scenario("exactly the limit", {norm: "1000 -1000.1", **limit}, {0: [], 1: [NORM]}, limited)
    loss = {series("rankscope_loss", **RANK, loss="lm"): "1000 -1001", **limit}
    yield scenario("a logged number beyond the limit", loss, {0: [], 1: [RANK]}, limited)
    seed = [AnomalyNan(infs=False)]
    given = {series("rankscope_tensor_value", **OF_W, op="infs"): "3", series("rankscope_loss", **RANK): "Inf"}
    yield scenario("the original tool's rule leaves infinity alone", given, {0: []}, seed)


def vectors():
    """Yield the recorded series of the original tool, each step as a rank of its own, judged by each rule by itself.

    What must fire is what the reference evaluator says; where that differs from the tool is the contract's matter.
    """
    rules = [AnomalyNan(infs=False, threshold=1.0), AnomalyTurbulence(threshold=1.0)]
    given, fires = {}, {rule.name: [] for rule in rules}
    for vector in VECTORS:
        kind, op = (None, "value") if vector["id"] in SCALAR_VECTORS else ("grad_reduced", vector["op"])
        for entry in vector["rules"]:
            arguments = {**(entry.get("args") or {}), **({"infs": False} if entry["rule_name"] == "AnomalyNan" else {})}
            rule = rule_from_config({**entry, "args": arguments})
            evaluator = SeriesEvaluator([rule], kind, op)
            for step, raw in enumerate(float(value) for value in vector["series"]):
                before = evaluator.baseline
                firing = evaluator.observe(raw)
                rank = {"run": vector["id"], "rank": str(step)}
                against = evaluator.baseline if math.isnan(before) else before
                labels = {**rank, "kind": kind, "tensor": "w", "op": op} if kind else rank
                shown = to_float32(raw) if kind else raw
                given |= _shown(labels, shown, against, rank, rule)
                # A statistic is over finite elements; the tool's could be NaN, ours is absent, and the count tells.
                fires[rule.name] += [labels] if firing and not (kind and math.isnan(raw)) else []
    for rule in rules:
        yield Scenario(
            alert=rule.name, what="recorded vectors", given=given, expected={0: fires[rule.name]}, rules=rules
        )


def _shown(labels, value, baseline, rank, rule):
    limit = math.nan if rule.limit() is None else rule.limit()
    threshold = {series("rankscope_rule_threshold", **rank, rule=rule.name): written(limit)}
    if "op" not in labels:
        return {series("rankscope_loss", **labels): written(value), **threshold}
    shown = {series("rankscope_tensor_value", **labels): written(value)}
    if labels["op"] in {"norm", "mean"}:
        shown[series("rankscope_tensor_baseline", **labels)] = written(baseline)
    return {**shown, **threshold}


def events():
    fired = {**without(NAN_KIND, "rule")}
    for metric in ("rankscope_anomaly_events_total", "rankscope_ingest_anomaly_events_total"):
        counter, other = series(metric, **NAN_KIND), series(metric, **{**NAN_KIND, "rule": "AnomalyTurbulence"})

        def scenario(what, values, expected, name=counter):
            return Scenario(alert="AnomalyNanEvents", what=what, given={name: values}, expected=expected)

        yield scenario("a spike between two scrapes", "0x19 1x40", {19: [], 20: [fired], 31: [fired], 33: []})
        yield scenario("a counter born above zero", "_ _ _ 1x40", {2: [], 3: [fired], 12: [fired], 16: []})
        yield scenario("a counter at zero", "0x40", {0: [], 20: []})
        yield scenario("firings of long ago", "7x40", {20: []})
        yield scenario("a process that begins anew", "7x30 0x20 1x20", {29: [], 45: [], 52: [fired]})
        yield scenario("firings of another rule", "0 1", {1: []}, other)
    two = {
        series("rankscope_anomaly_events_total", **{**NAN_KIND, "kind": kind}): "0 1" for kind in ("exp_avg", "act_out")
    }
    each = [fired, {**fired, "kind": "act_out"}]
    yield Scenario(alert="AnomalyNanEvents", what="one alert for each kind", given=two, expected={1: each})
    logged = {series("rankscope_anomaly_events_total", **{**NAN_KIND, "kind": ""}): "0 1"}
    yield Scenario(alert="AnomalyNanEvents", what="a logged number", given=logged, expected={0: [], 1: [RANK]})
    turbulent = series("rankscope_anomaly_events_total", **{**NAN_KIND, "rule": "AnomalyTurbulence"})
    its_own = {0: [], 1: [fired]}
    yield Scenario(alert="AnomalyTurbulenceEvents", what="its own", given={turbulent: "0 1"}, expected=its_own)


def lifecycle():
    for alert, state in (("RunFailed", "failed"), ("RunStalled", "stalled")):
        for other in RunState:
            given = {series("rankscope_run_state", **SERVICE, run="r", state=other): "0 1 0"}
            when = [{"run": "r"}] if other == state else []
            yield Scenario(alert=alert, what=f"{alert}: {other}", given=given, expected={0: [], 1: when, 2: []})
        forgotten = {series("rankscope_run_state", **SERVICE, run="r", state=state): "1 stale"}
        yield Scenario(alert=alert, what="the run is forgotten", given=forgotten, expected={0: [{"run": "r"}], 1: []})
        two = {series("rankscope_run_state", **SERVICE, run=run, state=state): "1" for run in "rs"}
        each = [{"run": "r"}, {"run": "s"}]
        yield Scenario(alert=alert, what="an alert for each run", given=two, expected={0: each})
    given = {
        series("rankscope_rank_vanished", **SERVICE, run="r", rank=rank): v
        for rank, v in (("0", "0x9"), ("1", "0 1 0"))
    }
    gone = [{"run": "r", "rank": "1"}]
    yield Scenario(alert="RankGone", what="one of two, back later", given=given, expected={0: [], 1: gone, 2: []})
    lost = series("rankscope_ingest_lost_records_total", **SERVICE, run="r")
    run = [{"run": "r"}]
    for what, values, expected in (
        ("none", "0x60", {0: [], 50: []}),
        ("one, and none for five minutes", "0x39 1x60", {39: [], 40: run, 69: run, 71: []}),
        ("a counter born above zero", "_ 3x60", {1: run, 29: run, 40: []}),
        ("losses of long ago", "5x60", {50: []}),
    ):
        yield Scenario(alert="IngestLosing", what=what, given={lost: values}, expected=expected)
    two = {series("rankscope_ingest_lost_records_total", **SERVICE, run=run): "0 1" for run in "rs"}
    yield Scenario(alert="IngestLosing", what="each run", given=two, expected={1: [{"run": "r"}, {"run": "s"}]})
    up = series("up", **SERVICE)
    for what, given, expected in (
        ("it answers", {up: "1x9"}, {0: [], 9: []}),
        ("half a minute of silence, and an answer", {up: "0x6 1"}, {0: [], 2: [], 3: [SERVICE], 7: []}),
        ("a short silence", {up: "1 0 0 1x9"}, {1: [], 2: [], 3: [], 9: []}),
        ("nobody asks it", {"up{job='rankscope'}": "1x9"}, {2: [], 3: [without(SERVICE, "instance")]}),
    ):
        yield Scenario(alert="ServiceDown", what=what, given=given, expected=expected)


def hardware():
    gpu = {**RANK, "gpu": "GPU-1"}
    for alert, errors in (
        ("GpuXid", series("rankscope_gpu_xid_errors_total", **gpu)),
        ("GpuEccUncorrected", series("rankscope_gpu_ecc_errors_total", **gpu, type="uncorrected")),
    ):
        yield Scenario(alert=alert, what="none", given={errors: "0x40"}, expected={0: [], 40: []})
        told = {19: [], 20: [gpu], 79: [gpu], 81: []}
        yield Scenario(alert=alert, what="one, for ten minutes", given={errors: "0x19 1x80"}, expected=told)
    corrected = series("rankscope_gpu_ecc_errors_total", **gpu, type="corrected")
    yield Scenario(alert="GpuEccUncorrected", what="corrected ones", given={corrected: "0 1 2"}, expected={2: []})
    old = series("rankscope_gpu_ecc_errors_total", **gpu, type="uncorrected")
    yield Scenario(alert="GpuEccUncorrected", what="of earlier runs", given={old: "7x40"}, expected={0: [], 40: []})
    for reason, expected in (("hw_thermal", [gpu]), ("sw_thermal", [gpu]), ("sw_power_cap", []), ("idle", [])):
        slow = {series("rankscope_gpu_throttled", **gpu, reason=reason): "1x40"}
        when = {29: [], 30: expected, 40: expected}
        yield Scenario(alert="GpuThrottled", what=f"{reason} for five minutes", given=slow, expected=when)
    short = {series("rankscope_gpu_throttled", **gpu, reason="hw_slowdown"): "1x20 0 1x20"}
    yield Scenario(alert="GpuThrottled", what="twice for a short while", given=short, expected={20: [], 41: []})


def self_check():
    def scenario(rule, what, given, expected):
        said = [{**one, "judged_by": rule} for one in ({**RANK, "kind": "grad_unreduced"},)]
        when = {at: said if differs else [] for at, differs in expected.items()}
        return Scenario(alert="RuleDisagreement", what=what, given=given, expected=when)

    nans = series("rankscope_tensor_value", **OF_W, op="nans")
    verdict = series("rankscope_rule_firing", **RANK, rule="AnomalyNan", kind="grad_unreduced")
    dropped = series("rankscope_dropped_total", **RANK, reason="series_budget")
    overrun = series("rankscope_dropped_total", **RANK, reason="ring_overrun")
    yield scenario("AnomalyNan", "both say so, both deny it", {nans: "0 1 0", verdict: "0 1 0"}, {0: 0, 1: 0, 2: 0})
    yield scenario("AnomalyNan", "PromQL alone", {nans: "0 1 0x50", verdict: "0x50"}, {0: 0, 1: 1, 20: 1, 40: 0})
    yield scenario("AnomalyNan", "the rank knows no such rule", {nans: "0 1"}, {0: 0, 1: 1})
    yield scenario("AnomalyNan", "the rank alone", {nans: "0x50", verdict: "0 1 0x50"}, {0: 0, 1: 1, 20: 1, 40: 0})
    left_out = {nans: "0 0", verdict: "1 1", dropped: "1 1"}
    yield scenario("AnomalyNan", "what the page leaves out cannot be compared", left_out, {0: 0, 1: 0})
    records = {nans: "0 0", verdict: "0 1", overrun: "1 1", dropped: "0 0"}
    yield scenario("AnomalyNan", "lost records leave nothing out of the page", records, {0: 0, 1: 1})
    scalar = {series("rankscope_rule_firing", **RANK, rule="AnomalyNan", kind=""): "1"}
    yield scenario("AnomalyNan", "logged numbers are not compared", scalar, {0: 0})
    neighbours = {nans: "1", verdict: "0"}
    for labels in ({"rank": "1"}, {"kind": "grad_reduced"}):
        neighbour = {**OF_W, **labels}
        neighbours[series("rankscope_tensor_value", **neighbour, op="nans")] = "1"
        neighbours[series("rankscope_rule_firing", **without(neighbour, "tensor"), rule="AnomalyNan")] = "1"
    yield scenario("AnomalyNan", "what others agree on proves nothing", neighbours, {0: 1})
    turbulent = series("rankscope_rule_firing", **RANK, rule="AnomalyTurbulence", kind="grad_unreduced")
    yield scenario("AnomalyTurbulence", "both say so", {**page("1 9"), turbulent: "0 1"}, {0: 0, 1: 0})
    yield scenario("AnomalyTurbulence", "PromQL alone", {**page("1 9"), turbulent: "0 0"}, {0: 0, 1: 1})
    yield scenario("AnomalyTurbulence", "the rank alone", {**page("1 1"), turbulent: "0 1"}, {0: 0, 1: 1})


def replicas():
    group = {"run": "r", "replicas": "0-2"}

    def hashes(*values, steps=("100x30",) * 3, **labels):
        own = {**group, **labels}
        shown = {series("rankscope_replica_hash", **own, rank=rank): value for rank, value in enumerate(values)}
        shown |= {series("rankscope_replica_hash_step", **own, rank=rank): step for rank, step in enumerate(steps)}
        return shown

    large = 2**48 - 1
    for what, given, expected in (
        ("all equal", hashes("7x30", "7x30", "7x30"), {0: [], 9: []}),
        ("one differs", hashes("7x30", "7 8x29", "7x30"), {0: [], 1: [group], 9: [group]}),
        ("by one in the last place", hashes(f"{large}x9", f"{large - 1}x9", f"{large}x9"), {1: [group]}),
        (
            "a rank with the next step",
            hashes("7 9x29", "7x30", "7x30", steps=("100 200x29",) + ("100x30",) * 2),
            {1: []},
        ),
        (
            "kept while one is ahead",
            hashes("7 9 9x60", "8x60", "7x60", steps=("100 200x60",) + ("100x60",) * 2),
            {1: [group], 7: []},
        ),
        ("a rank is gone", hashes("7x30", "7x30", "stale"), {1: []}),
        ("equal again, a minute later", hashes("7x30", "8 7x29", "7x30"), {0: [group], 5: [group], 8: []}),
    ):
        yield Scenario(alert="ReplicaDesync", what=what, given=given, expected=expected)
    others = (
        hashes("7x9", "7x9", "7x9") | hashes("5x9", "5x9", "5x9", replicas="3-5") | hashes("6x9", "6x9", "6x9", run="s")
    )
    yield Scenario(alert="ReplicaDesync", what="groups and runs for themselves", given=others, expected={1: []})
    fired = {"run": "r", "rank": "1", "kind": "param_after"}
    told = series("rankscope_ingest_anomaly_events_total", **SERVICE, **fired, rule="ReplicaDesync")
    other = series("rankscope_ingest_anomaly_events_total", **SERVICE, **fired, rule="AnomalyNan")
    for what, given, expected in (
        ("none", {told: "0x60"}, {0: [], 50: []}),
        ("one, and none for two minutes", {told: "0x9 1x60"}, {9: [], 10: [fired], 20: [fired], 23: []}),
        ("a counter born above zero", {told: "_ 3x60"}, {1: [fired], 11: [fired], 20: []}),
        ("long ago", {told: "5x60"}, {50: []}),
        ("other rules", {told: "0x9", other: "0 9x9"}, {2: []}),
    ):
        yield Scenario(alert="ReplicaDesyncEvents", what=what, given=given, expected=expected)


SUITE = [*replicas(), *turbulence(), *nan(), *vectors(), *events(), *lifecycle(), *hardware(), *self_check()]
