"""Scenarios for each alert: input series as ranks and service export them, and the alerts that must be active when."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rankscope_contract.model.events import RunState
from rankscope_contract.rules import rule_from_config
from rankscope_contract.rules.anomaly import AnomalyNan, AnomalyTurbulence
from rankscope_contract.rules.curve import SeriesEvaluator, to_float32
from rankscope_dashboards.alerts.alert import RUNBOOKS
from rankscope_dashboards.alerts.groups import DEFAULT_RULES, alert_groups

VECTORS = json.loads((Path(__file__).parents[2] / "contract/rules/data/anomaly_vectors.json").read_text())["series"]
SCALAR_VECTORS = {"N01", "N02"}  # contain NaN values: tested as logged scalars, because tensor statistics are finite
SECONDS = 10  # interval of samples and of evaluations

RANK = {"run": "r", "rank": "0"}
OF_W = {**RANK, "kind": "grad_unreduced", "tensor": "w"}
NORM = {**OF_W, "op": "norm"}
NAN_KIND = {**RANK, "rule": "AnomalyNan", "kind": "exp_avg"}
SERVICE = {"job": "rankscope-service", "instance": "127.0.0.1:9470"}
NO_TENSOR = {"kind": "n/a", "tensor": "n/a", "op": "n/a"}
SCALAR = {**RANK, **NO_TENSOR}


def series(metric, **labels):
    return metric + "{" + ", ".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def written(value):
    return "NaN" if math.isnan(value) else f"{value:+}".title() if math.isinf(value) else repr(value)


def without(labels, *names):
    return {name: value for name, value in labels.items() if name not in names}


@dataclass(frozen=True)
class Scenario:
    """Input series in promtool's notation, and `expected`: labels of the active alerts by index of a sample."""

    alert: str
    title: str
    given: Mapping[str, str]
    expected: Mapping[int, Sequence[Mapping[str, str]]]
    rules: Sequence = field(default=DEFAULT_RULES)

    def document(self):
        checks = [
            {
                "eval_time": f"{SECONDS * at}s",
                "alertname": self.alert,
                "exp_alerts": [self.expected_alert(one) for one in alerts],
            }
            for at, alerts in self.expected.items()
        ]
        given = [{"series": name, "values": values} for name, values in self.given.items()]
        return {"name": self.title, "interval": f"{SECONDS}s", "input_series": given, "alert_rule_test": checks}

    def expected_alert(self, labels):
        """Return the alert as Prometheus sends it: all labels, and annotations with the labels filled in."""
        alerts = [alert for group in alert_groups(self.rules) for alert in group.alerts if alert.name == self.alert]
        alert = next(one for one in alerts if one.labels.get("judged_by") == labels.get("judged_by"))
        whole = {**labels, **alert.all_labels()}
        # Queries in annotations return nothing for these series, and must then add no text.
        texts = {name: filled_in(text, whole) for name, text in alert.annotations(RUNBOOKS).items()}
        return {"exp_labels": whole, "exp_annotations": texts}


def filled_in(text, labels):
    """Return the annotation that Prometheus makes from the template `text`."""
    inner = r"((?:(?!\{\{ (?:if|else|end)).)*?)"
    choice = (
        rf'\{{\{{ if (?:eq )?\$labels\.(\w+)(?: "([\w/]+)")? \}}\}}{inner}\{{\{{ else \}}\}}{inner}\{{\{{ end \}}\}}'
    )

    def chosen(found):
        value, compared, yes, no = labels.get(found[1]), *found.groups()[1:]
        return yes if (value == compared if compared else value) else no

    while (shorter := re.sub(choice, chosen, text)) != text:  # the innermost choices first
        text = shorter
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels.get(found[1], ""), text)


def test_file(scenarios):
    """Return the scenarios as a promtool test file. As many as possible share one test: each test creates a storage."""
    packed = [scenario for scenario in scenarios if all('run="' in name for name in scenario.given)]
    single = [scenario for scenario in scenarios if scenario not in packed]
    tests = [*([_side_by_side(packed)] if packed else []), *(scenario.document() for scenario in single)]
    return {"evaluation_interval": f"{SECONDS}s", "tests": tests}


def values_above_zero(expression, scenarios):
    """Return a promtool test file that fails if `expression` returns a value that is not above zero, such as NaN."""
    never = f"({expression}) unless (({expression}) > 0)"
    times = sorted({at for scenario in scenarios for at in scenario.expected})
    checks = [{"expr": never, "eval_time": f"{SECONDS * at}s", "exp_samples": []} for at in times]
    document = test_file(scenarios)
    checked = [{**test, "alert_rule_test": [], "promql_expr_test": checks} for test in document["tests"]]
    return {**document, "tests": checked}


def _side_by_side(scenarios):
    """Return one test for all scenarios. The runs of each scenario get a unique prefix, so alerts do not mix."""
    given, checks = [], []
    for number, scenario in enumerate(scenarios):
        own = {re.sub('run="', f'run="{number}.', name): values for name, values in scenario.given.items()}
        given += [{"series": name, "values": values} for name, values in own.items()]
        firing = f'ALERTS{{alertname="{scenario.alert}", alertstate="firing", run=~"{number}[.].*"}}'
        for at, alerts in scenario.expected.items():
            labels = [scenario.expected_alert({**one, "run": f"{number}.{one['run']}"})["exp_labels"] for one in alerts]
            active = [series("ALERTS", alertname=scenario.alert, alertstate="firing", **one) for one in labels]
            samples = [{"labels": name, "value": 1} for name in active]
            checks.append({"expr": firing, "eval_time": f"{SECONDS * at}s", "exp_samples": samples})
    return {"interval": f"{SECONDS}s", "input_series": given, "promql_expr_test": checks}


# The series that a rank exports for one tensor statistic that a rule evaluates.


def page(values, baselines="1x30", thresholds="0.5x30", **labels):
    tensor = {**NORM, **labels}
    return {
        series("rankscope_tensor_value", **tensor): values,
        series("rankscope_tensor_baseline", **tensor): baselines,
        series("rankscope_rule_threshold", run="r", rank=tensor["rank"], rule="AnomalyTurbulence"): thresholds,
    }


def turbulence():
    both = [AnomalyTurbulence(threshold=0.5, direction="both", ops=("norm", "mean"))]
    ranks = page("2", thresholds="0.5") | page("2", thresholds="3", rank="1")
    tensors = page("2", baselines="1") | page("2", baselines="3", tensor="v")
    zero, fall = page("0 1", baselines="0 0"), page("0.5 0.4999999", thresholds="1 1")
    for row in (
        ("equal to the threshold does not fire, slightly above fires", page("1.5 1.5000001"), {0: [], 1: [NORM]}),
        ("stays active for a minute, then resolves", page("9 1x20"), {0: [NORM], 5: [NORM], 9: []}),
        ("a fall does not fire with the default direction", page("0.1"), {0: []}),
        ("infinity fires, NaN does not", page("NaN Inf"), {0: [], 1: [NORM]}),
        ("does not fire without a threshold", page("9", thresholds="NaN"), {0: []}),
        ("does not fire without a baseline", page("0 9", baselines="NaN NaN"), {0: [], 1: []}),
        ("baseline 0: value 0 does not fire, value 1 fires", zero, {0: [], 1: [NORM]}),
        ("a kind that the rule does not include", page("9", kind="exp_avg"), {0: []}),
        ("kind grad_reduced", page("9", kind="grad_reduced"), {0: [{**NORM, "kind": "grad_reduced"}]}),
        ("an op that the rule does not include", page("9", op="mean"), {0: []}),
        ("each rank is compared with its own threshold", ranks, {0: [NORM]}),
        ("each tensor is compared with its own baseline", tensors, {0: [NORM]}),
        ("a tensor that is no longer exported", page("9 _ stale", baselines="1 _ stale"), {0: [NORM], 9: []}),
        ("the absolute value is compared", page("-2", op="mean"), {0: [{**NORM, "op": "mean"}]}, both),
        ("a fall with direction both", fall, {0: [], 1: [NORM]}, both),
        ("a rise with direction both", page("1.5 1.6"), {0: [], 1: [NORM]}, both),
    ):
        yield Scenario("AnomalyTurbulence", *row)


def nan():
    scenario = partial(Scenario, "AnomalyNan")

    for op in ("nans", "infs"):
        count = series("rankscope_tensor_value", **OF_W, op=op)
        yield scenario(f"one element in {op}", {count: "0 1 0x20"}, {0: [], 1: [{**OF_W, "op": op}], 9: []})
    known = {
        series("rankscope_tensor_value", **OF_W, op="infs"): "6x30",
        series("rankscope_tensor_value", **{**OF_W, "tensor": "v"}, op="nans"): "0x9 1 0x20",
        series("rankscope_rule_firing", **RANK, rule="AnomalyNan", kind="grad_unreduced"): "0x20 1 0x9",
        series("rankscope_rule_firing", **RANK, rule="AnomalyNan", kind="grad_reduced"): "0x30",
    }
    later = {9: [], 10: [{**OF_W, "tensor": "v", "op": "nans"}], 20: [], 21: [{**OF_W, "op": "infs"}]}
    yield scenario("the rank knows infinities from the first value on", known, later)
    norm = series("rankscope_tensor_value", **NORM)
    yield scenario("AnomalyNan does not evaluate the norm", {norm: "NaN Inf 9e30"}, {0: [], 1: [], 2: []})
    scalars = {
        "rankscope_loss": {"loss": "lm"},
        "rankscope_grad_norm": {},
        "rankscope_learning_rate": {"group": "0"},
        "rankscope_scalar": {"name": "z"},
    }
    for metric, labels in scalars.items():
        for value in ("NaN", "Inf", "-Inf"):
            given = {series(metric, **RANK, **labels): f"2.5 {value} 2.5x20"}
            yield scenario(f"{metric} is {value}, and recovers", given, {0: [], 1: [SCALAR], 6: [SCALAR], 9: []})
    yield scenario("a scalar that is no longer exported", {series("rankscope_loss", **RANK): "stale"}, {0: []})
    limited = [AnomalyNan(threshold=1000.0)]
    limit = {series("rankscope_rule_threshold", **RANK, rule="AnomalyNan"): "1000x9"}
    yield scenario(
        "equal to the threshold does not fire, above fires",
        {norm: "1000 -1000.1", **limit},
        {0: [], 1: [NORM]},
        limited,
    )
    loss = {series("rankscope_loss", **RANK, loss="lm"): "1000 -1001", **limit}
    yield scenario("a logged scalar above the threshold", loss, {0: [], 1: [SCALAR]}, limited)
    for number, name in enumerate(("aux_loss", "params_norm", "loss_scale", "memory_bytes")):
        given = {series("rankscope_scalar", **RANK, name=name): "1000 1001", **limit}
        yield scenario(f"the limit and the scalar {name}", given, {0: [], 1: [SCALAR] if number < 2 else []}, limited)
    rate = {series("rankscope_learning_rate", **RANK, group="0"): "1001", **limit}
    yield scenario("the limit does not apply to the learning rate", rate, {0: []}, limited)
    seed = [AnomalyNan(infs=False)]
    given = {series("rankscope_tensor_value", **OF_W, op="infs"): "3", series("rankscope_loss", **RANK): "Inf"}
    yield scenario("msprobe's rule ignores infinity", given, {0: []}, seed)


def vectors():
    """Yield series recorded from msprobe, one scenario for each rule. Each step is exported as a separate rank."""
    # The expected firings are those of the reference evaluator. Tests of the contract compare the evaluator with
    # msprobe.
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
                alert = labels if kind else {**rank, **NO_TENSOR}
                shown = to_float32(raw) if kind else raw
                given |= _shown(labels, shown, against, rank, rule)
                # Tensor statistics cover finite elements only. Where msprobe has NaN, the statistic is missing here,
                # and the op `nans` counts these elements.
                fires[rule.name] += [alert] if firing and not (kind and math.isnan(raw)) else []
    for rule in rules:
        yield Scenario(rule.name, "recorded vectors", given, {0: fires[rule.name]}, rules)


def _shown(labels, value, baseline, rank, rule):
    limit = math.nan if rule.limit() is None else rule.limit()
    threshold = {series("rankscope_rule_threshold", **rank, rule=rule.name): written(limit)}
    if "op" not in labels:
        return {series("rankscope_loss", **labels): written(value), **threshold}
    shown = {series("rankscope_tensor_value", **labels): written(value)}
    if labels["op"] in {"norm", "mean"}:
        shown[series("rankscope_tensor_baseline", **labels)] = written(baseline)
    return {**shown, **threshold}


def counted():
    """Yield scenarios of firings between two scrapes: the scraped values never show them."""
    fired = {**without(NAN_KIND, "rule"), "tensor": "w", "op": "nans"}
    for rule in ("AnomalyNan", "AnomalyTurbulence"):
        labels = {**fired, "rule": rule}
        counter = series("rankscope_tensor_anomaly_events_total", **labels)
        age = series("rankscope_anomaly_age_seconds", **without(labels, "tensor", "op"))
        other = {**labels, "rule": "Other"}

        scenario = partial(Scenario, rule)
        yield scenario("one more firing", {counter: "3x19 4x40"}, {19: [], 20: [fired], 36: [fired], 40: []})
        first = {counter: "_x19 1x40", age: "_x19 0+10x40"}
        yield scenario("the first firing", first, {18: [], 19: [fired], 35: [fired], 40: []})
        yield scenario("firings before the window", {counter: "7x40"}, {20: []})
        yield scenario(
            "firings of another rule", {series("rankscope_tensor_anomaly_events_total", **other): "0 9"}, {1: []}
        )
        for title, seconds, when in (("before the window", 600, []), ("within the window", 80, [fired])):
            given = {counter: "_ _ _ 7x40", age: f"_ _ _ {seconds}+10x40"}
            yield scenario(f"a firing {title}, seen late", given, {3: when, 15: []})
        away = {counter: "0 1 1x5 _x30 1x40", age: "_ 0+10x5 _x30 360+10x40"}
        yield scenario("no second firing after a gap", away, {1: [fired], 30: [], 40: [], 50: []})


def events():
    fired = {**without(NAN_KIND, "rule")}
    for metric in ("rankscope_anomaly_events_total", "rankscope_ingest_anomaly_events_total"):
        counter, other = series(metric, **NAN_KIND), series(metric, **{**NAN_KIND, "rule": "AnomalyTurbulence"})

        def scenario(title, values, expected, name=counter):
            return Scenario("AnomalyNanEvents", title, {name: values}, expected)

        yield scenario("one firing between two scrapes", "0x19 1x40", {19: [], 20: [fired], 31: [fired], 33: []})
        yield scenario(
            "a counter with a first sample above zero", "_ _ _ 1x40", {2: [], 3: [fired], 12: [fired], 16: []}
        )
        yield scenario("a counter that is 0", "0x40", {0: [], 20: []})
        yield scenario("firings before the window", "7x40", {20: []})
        yield scenario("counter reset after a restart", "7x30 0x20 1x20", {29: [], 45: [], 52: [fired]})
        yield scenario("firings of another rule", "0 1", {1: []}, other)
        yield from after_downtime("AnomalyNanEvents", counter, {3: [], 8: []}, {3: [fired], 8: []})
        age = counter.replace("_events_total", "_age_seconds")
        away = {counter: "0 1 1x5 _x30 1x40", age: "_ 0+10x5 _x30 360+10x40"}
        title = "no second firing after Prometheus was away for longer than the window"
        yield Scenario("AnomalyNanEvents", title, away, {1: [fired], 30: [], 38: [], 40: [], 50: []})
    two = {
        series("rankscope_anomaly_events_total", **{**NAN_KIND, "kind": kind}): "0 1" for kind in ("exp_avg", "act_out")
    }
    each = [fired, {**fired, "kind": "act_out"}]
    yield Scenario("AnomalyNanEvents", "one alert for each kind", two, {1: each})
    logged = {series("rankscope_anomaly_events_total", **{**NAN_KIND, "kind": ""}): "0 1"}
    yield Scenario("AnomalyNanEvents", "a logged scalar", logged, {0: [], 1: [{**RANK, "kind": "n/a"}]})
    turbulent = series("rankscope_anomaly_events_total", **{**NAN_KIND, "rule": "AnomalyTurbulence"})
    expected = {0: [], 1: [fired]}
    yield Scenario("AnomalyTurbulenceEvents", "turbulence", {turbulent: "0 1"}, expected)


def after_downtime(alert, counter, old, recent):
    """Yield scenarios of a Prometheus that was down when the counter increased, long ago and recently."""
    age = counter.replace("_events_total", "_age_seconds").replace("records_total", "records_age_seconds")
    for title, first, expected in (("before the window", 600, old), ("within the window", 80, recent)):
        given = {counter: "_ _ _ 7x40", age: f"_ _ _ {first}+10x40"}
        yield Scenario(alert, f"an increase {title}, seen late", given, expected)


def incidents():
    """The labels `rule` and `severity` of these alerts are those of the series."""
    first = {**RANK, "rule": "AnomalyNan", "severity": "warning", "kind": "grad_unreduced", "tensor": "w", "op": "nans"}
    age = "rankscope_ingest_incident_age_seconds"
    for title, labels in (
        ("a firing on a tensor", {**first, "step": "150"}),
        ("a firing on a logged scalar", {**without(first, "kind", "tensor"), "op": "value", "step": "150"}),
        ("a firing without a step", without(first, "kind", "tensor", "op")),
        ("a firing of an unknown rank", without(first, "rank")),
    ):
        given = {series(age, **SERVICE, **labels): "0+10x60"}
        alert = [{**NO_TENSOR, "step": "unknown", "rank": "unknown", **labels}]
        yield Scenario("AnomalyIncident", title, given, {0: alert, 11: alert, 12: []})
    alert = [{**first, "step": "150"}]
    known = series(age, **SERVICE, **first, step="150")
    state = series("rankscope_run_state", **SERVICE, run="r", state="running")
    for title, values, states, expected in (
        ("a restart of the service", "0+10x5 stale _x20 280+10x9", "1x5 stale _x20 1x9", {5: alert, 26: alert, 27: []}),
        ("a first firing that was found to be another one", "0+10x5 stale", "1x60", {5: alert, 6: []}),
    ):
        given = {known: values, state: states}
        yield Scenario("AnomalyIncident", title, given, expected)
    later = {series(age, **SERVICE, **first, step="150"): "900+10x9"}
    yield Scenario("AnomalyIncident", "an old incident, seen late", later, {0: [], 9: []})
    cut = {series(age, **SERVICE, **first, step="150"): "0 10 _x30"}
    yield Scenario("AnomalyIncident", "Prometheus is away", cut, {1: alert, 11: alert, 12: [], 30: []})
    two = [{**first, "rank": rank, "step": step} for rank, step in (("0", "150"), ("1", "900"))]
    given = {series(age, **SERVICE, **labels): "0x9" for labels in two}
    yield Scenario("AnomalyIncident", "two incidents of a run", given, {0: two})
    age = series("rankscope_anomaly_age_seconds", **NAN_KIND)
    fired = {age: "0+10x60"}
    alone = [{"run": "r", "rule": "AnomalyNan"}]
    state = series("rankscope_run_state", **SERVICE, run="r", state="running")
    later = {age: "_x6 0+10x60"}
    other_rank = {series("rankscope_anomaly_age_seconds", **{**NAN_KIND, "rank": "1"}): "_x6 0+10x60"}
    for title, given, expected in (
        ("no service", fired, {5: [], 6: alone, 11: alone, 12: []}),
        ("a service that follows the run", {**fired, state: "1x60"}, {6: [], 11: []}),
        ("a service that follows another run", {**fired, state.replace('"r"', '"s"'): "1x60"}, {6: alone}),
        ("a service that follows a rule that fires at each step", {age: "0x60", state: "1x60"}, {6: [], 11: []}),
        ("a service that is away soon after the firing", {age: "5+10x60", state: "1 1 stale"}, {10: [], 11: []}),
        ("a service that is away at the firing", {state: "1x3 stale", **later}, {10: [], 12: alone, 17: alone, 18: []}),
        ("a service that is away directly after the firing", {state: "1x6 stale", **later}, {10: [], 13: alone}),
        ("samples from before an outage", {age: "0 10 _x30"}, {6: alone, 11: alone, 12: []}),
        ("only one of two firings was reported", {**fired, state: "1x3 stale", **other_rank}, {11: [], 12: alone}),
    ):
        yield Scenario("AnomalyWithoutService", title, given, expected)


def scores():
    """One alert for all rules: the rule of these series is in no rule file."""
    own, other = {**RANK, "rule": "Own"}, {**RANK, "rule": "Other"}

    def page(scores, limits="0.5x9", **labels):
        return {
            series("rankscope_rule_score", **{**own, **labels}): scores,
            series("rankscope_rule_threshold", **{**own, **labels}): limits,
        }

    for title, given, expected in (
        ("equal to the limit does not fire, slightly above fires", page("0.5 0.5000001 0.5"), {0: [], 1: [own], 2: []}),
        ("a negative limit", page("-2 -0.5 0", "-1x9"), {0: [], 1: [own], 2: [own]}),
        ("NaN is no score and no limit", page("NaN") | page("9", "NaN", rule="Other"), {0: []}),
        ("a rule without a score", {series("rankscope_rule_threshold", **own): "-1"}, {0: []}),
        ("the limit of another rule", page("3", "5") | page("1", "2", rule="Other"), {0: []}),
        ("each rule of a rank", page("3", "2") | page("1", "0", rule="Other"), {0: [own, other]}),
        ("each rank with its own limit", page("3", "2") | page("3", "4", rank="1"), {0: [own]}),
        ("a rank that is no longer exported", page("3 stale", "2 stale"), {0: [own], 1: []}),
    ):
        yield Scenario("ScoreAboveLimit", title, given, expected)


def lifecycle():
    for other in RunState:
        given = {series("rankscope_run_state", **SERVICE, run="r", state=other): "0 1 0"}
        when = [{"run": "r"}] if other == "stalled" else []
        yield Scenario("RunStalled", f"RunStalled: {other}", given, {0: [], 1: when, 2: []})
    state = series("rankscope_run_state", **SERVICE, run="r", state="failed")
    for alert, name, labels in (
        ("RunFailed", "rankscope_run_failure", {"rank": "1", "reason": "ValueError"}),
        ("RunFailed", "rankscope_run_failure", {"rank": "unknown", "reason": "unknown"}),
        ("RunStalled", "rankscope_run_state", {"state": "stalled"}),
    ):
        failed = series(name, **SERVICE, run="r", **labels)
        own = {} if alert == "RunStalled" else labels
        run = [{"run": "r", **own}]
        for title, given, expected in (
            ("begin and end", {failed: "_ 1 0"}, {0: [], 1: run, 2: []}),
            ("the service no longer exports the run", {failed: "1 stale"}, {0: run, 29: run, 31: []}),
            ("a restart of the service", {failed: "1 stale _x20 1 0"}, {9: run, 20: run, 22: run, 23: []}),
            ("another state after a restart", {failed: "1 stale", state: "_x12 0"}, {11: run, 12: []}),
        ):
            yield Scenario(alert, title, given, expected)
        two = {series(name, **SERVICE, run=run, **labels): "1" for run in "rs"}
        each = [{"run": "r", **own}, {"run": "s", **own}]
        yield Scenario(alert, "an alert for each run", two, {0: each})
    earlier, later = (series("rankscope_run_failure", **SERVICE, run="r", rank=rank, reason="E") for rank in "01")
    given = {earlier: "1 stale", later: "_ 1 stale"}
    one = [{"run": "r", "rank": "0", "reason": "E"}]
    yield Scenario("RunFailed", "two reasons before an outage are one alert", given, {5: one})
    given = {
        series("rankscope_rank_vanished", **SERVICE, run="r", rank=rank): v
        for rank, v in (("0", "0x9"), ("1", "0 1 0"))
    }
    gone = [{"run": "r", "rank": "1"}]
    yield Scenario("RankGone", "one of two ranks, responds again later", given, {0: [], 1: gone, 2: []})
    vanished, state = (
        series(name, **SERVICE, run="r", **labels)
        for name, labels in (("rankscope_rank_vanished", {"rank": "1"}), ("rankscope_run_state", {"state": "failed"}))
    )
    for title, values, expected in (
        ("a restart of the service", "1 stale _x20 1", {9: gone, 20: gone, 22: gone}),
        ("the run without the rank", "1 stale _x20 1", {9: gone, 10: []}),
    ):
        states = "1 stale _x20 1" if "restart" in title else "1 stale _x8 1x20"
        yield Scenario("RankGone", title, {vanished: values, state: states}, expected)
    lost = series("rankscope_ingest_lost_records_total", **SERVICE, run="r")
    run = [{"run": "r"}]
    for title, values, expected in (
        ("no lost records", "0x60", {0: [], 50: []}),
        ("one lost record, resolves after five minutes", "0x39 1x60", {39: [], 40: run, 69: run, 71: []}),
        ("a counter with a first sample above zero", "_ 3x60", {1: run, 29: run, 40: []}),
        ("a service that is away soon after", "_ 3x9 stale _x9 3x30", {1: run, 15: run, 25: run, 40: []}),
        ("losses before the window", "5x60", {50: []}),
    ):
        yield Scenario("IngestLosing", title, {lost: values}, expected)
    yield from after_downtime("IngestLosing", lost, {3: [], 9: []}, {3: run, 9: run, 26: []})
    cut = {lost: "7 _x30", lost.replace("records_total", "records_age_seconds"): "200 _x30"}
    expected = {0: run, 10: run, 11: []}
    yield Scenario("IngestLosing", "a sample from before an outage", cut, expected)
    two = {series("rankscope_ingest_lost_records_total", **SERVICE, run=run): "0 1" for run in "rs"}
    yield Scenario("IngestLosing", "one alert for each run", two, {1: [{"run": "r"}, {"run": "s"}]})
    up = series("up", **SERVICE)
    for title, given, expected in (
        ("the service responds", {up: "1x9"}, {0: [], 9: []}),
        ("no response for 30 s, then a response", {up: "0x6 1"}, {0: [], 2: [], 3: [SERVICE], 7: []}),
        ("no response for less than 30 s", {up: "1 0 0 1x9"}, {1: [], 2: [], 3: [], 9: []}),
        (
            "the service is not scraped",
            {"up{job='rankscope'}": "1x9"},
            {2: [], 3: [{**SERVICE, "instance": "an unknown address"}]},
        ),
    ):
        yield Scenario("ServiceDown", title, given, expected)


def hardware():
    gpu = {**RANK, "gpu": "GPU-1"}
    for alert, errors in (
        ("GpuXid", series("rankscope_gpu_xid_errors_total", **gpu)),
        ("GpuEccUncorrected", series("rankscope_gpu_ecc_errors_total", **gpu, type="uncorrected")),
    ):
        yield Scenario(alert, "no errors", {errors: "0x40"}, {0: [], 40: []})
        active = {19: [], 20: [gpu], 79: [gpu], 81: []}
        yield Scenario(alert, "one error, active for ten minutes", {errors: "0x19 1x80"}, active)
    corrected = series("rankscope_gpu_ecc_errors_total", **gpu, type="corrected")
    yield Scenario("GpuEccUncorrected", "corrected errors", {corrected: "0 1 2"}, {2: []})
    old = series("rankscope_gpu_ecc_errors_total", **gpu, type="uncorrected")
    yield Scenario("GpuEccUncorrected", "errors of earlier runs", {old: "7x40"}, {0: [], 40: []})
    for reason, expected in (("hw_thermal", [gpu]), ("sw_thermal", [gpu]), ("sw_power_cap", []), ("idle", [])):
        slow = {series("rankscope_gpu_throttled", **gpu, reason=reason): "1x40"}
        when = {29: [], 30: expected, 40: expected}
        yield Scenario("GpuThrottled", f"{reason} for five minutes", slow, when)
    short = {series("rankscope_gpu_throttled", **gpu, reason="hw_slowdown"): "1x20 0 1x20"}
    yield Scenario("GpuThrottled", "twice for less than five minutes", short, {20: [], 41: []})


def self_check():
    def scenario(rule, title, given, expected):
        alerts = [{**one, "judged_by": rule} for one in ({**RANK, "kind": "grad_unreduced"},)]
        when = {at: alerts if differs else [] for at, differs in expected.items()}
        return Scenario("RuleDisagreement", title, given, when)

    nans = series("rankscope_tensor_value", **OF_W, op="nans")
    verdict = series("rankscope_rule_firing", **RANK, rule="AnomalyNan", kind="grad_unreduced")
    dropped = series("rankscope_dropped_total", **RANK, reason="series_budget")
    overrun = series("rankscope_dropped_total", **RANK, reason="ring_overrun")
    yield scenario("AnomalyNan", "both fire, neither fires", {nans: "0 1 0", verdict: "0 1 0"}, {0: 0, 1: 0, 2: 0})
    yield scenario("AnomalyNan", "only PromQL fires", {nans: "0 1 0x50", verdict: "0x50"}, {0: 0, 1: 1, 20: 1, 40: 0})
    yield scenario("AnomalyNan", "the rank does not export the rule", {nans: "0 1"}, {0: 0, 1: 1})
    yield scenario("AnomalyNan", "only the rank fires", {nans: "0x50", verdict: "0 1 0x50"}, {0: 0, 1: 1, 20: 1, 40: 0})
    left_out = {nans: "0 0", verdict: "1 1", dropped: "1 1"}
    yield scenario("AnomalyNan", "not compared if series are omitted", left_out, {0: 0, 1: 0})
    records = {nans: "0 0", verdict: "0 1", overrun: "1 1", dropped: "0 0"}
    yield scenario("AnomalyNan", "other drop reasons do not omit series", records, {0: 0, 1: 1})
    scalar = {series("rankscope_rule_firing", **RANK, rule="AnomalyNan", kind=""): "1"}
    yield scenario("AnomalyNan", "logged scalars are not compared", scalar, {0: 0})
    neighbours = {nans: "1", verdict: "0"}
    for labels in ({"rank": "1"}, {"kind": "grad_reduced"}):
        neighbour = {**OF_W, **labels}
        neighbours[series("rankscope_tensor_value", **neighbour, op="nans")] = "1"
        neighbours[series("rankscope_rule_firing", **without(neighbour, "tensor"), rule="AnomalyNan")] = "1"
    yield scenario("AnomalyNan", "agreement on other ranks and kinds does not count", neighbours, {0: 1})
    turbulent = series("rankscope_rule_firing", **RANK, rule="AnomalyTurbulence", kind="grad_unreduced")
    yield scenario("AnomalyTurbulence", "both fire", {**page("1 9"), turbulent: "0 1"}, {0: 0, 1: 0})
    yield scenario("AnomalyTurbulence", "only PromQL fires", {**page("1 9"), turbulent: "0 0"}, {0: 0, 1: 1})
    yield scenario("AnomalyTurbulence", "only the rank fires", {**page("1 1"), turbulent: "0 1"}, {0: 0, 1: 1})


def replicas():
    group = {"run": "r", "replicas": "0-2"}

    def hashes(*values, steps=("100x30",) * 3, **labels):
        own = {**group, **labels}
        shown = {series("rankscope_replica_hash", **own, rank=rank): value for rank, value in enumerate(values)}
        shown |= {series("rankscope_replica_hash_step", **own, rank=rank): step for rank, step in enumerate(steps)}
        return shown

    large = 2**48 - 1
    for title, given, expected in (
        ("all hashes are equal", hashes("7x30", "7x30", "7x30"), {0: [], 9: []}),
        ("one hash differs", hashes("7x30", "7 8x29", "7x30"), {0: [], 1: [group], 9: [group]}),
        ("48-bit hashes that differ by one", hashes(f"{large}x9", f"{large - 1}x9", f"{large}x9"), {1: [group]}),
        (
            "hashes of different steps are not compared",
            hashes("7 9x29", "7x30", "7x30", steps=("100 200x29",) + ("100x30",) * 2),
            {1: []},
        ),
        (
            "stays active for a minute while one rank is a step ahead",
            hashes("7 9 9x60", "8x60", "7x60", steps=("100 200x60",) + ("100x60",) * 2),
            {1: [group], 7: []},
        ),
        ("a rank is no longer exported", hashes("7x30", "7x30", "stale"), {1: []}),
        ("equal again, resolves after a minute", hashes("7x30", "8 7x29", "7x30"), {0: [group], 5: [group], 8: []}),
    ):
        yield Scenario("ReplicaDesync", title, given, expected)
    others = (
        hashes("7x9", "7x9", "7x9") | hashes("5x9", "5x9", "5x9", replicas="3-5") | hashes("6x9", "6x9", "6x9", run="s")
    )
    yield Scenario("ReplicaDesync", "groups and runs are compared separately", others, {1: []})
    fired = {"run": "r", "rank": "1", "kind": "param_after"}
    counter = series("rankscope_ingest_anomaly_events_total", **SERVICE, **fired, rule="ReplicaDesync")
    other = series("rankscope_ingest_anomaly_events_total", **SERVICE, **fired, rule="AnomalyNan")
    unknown = series("rankscope_ingest_anomaly_events_total", **SERVICE, **without(fired, "rank"), rule="ReplicaDesync")
    for title, given, expected in (
        ("no firings", {counter: "0x60"}, {0: [], 50: []}),
        ("one firing, resolves after two minutes", {counter: "0x9 1x60"}, {9: [], 10: [fired], 20: [fired], 23: []}),
        ("a counter with a first sample above zero", {counter: "_ 3x60"}, {1: [fired], 11: [fired], 20: []}),
        ("firings before the window", {counter: "5x60"}, {50: []}),
        ("firings of other rules", {counter: "0x9", other: "0 9x9"}, {2: []}),
        ("an unknown rank", {unknown: "0x9 1x60"}, {9: [], 10: [{**fired, "rank": "unknown"}]}),
    ):
        yield Scenario("ReplicaDesyncEvents", title, given, expected)
    yield from after_downtime("ReplicaDesyncEvents", counter, {3: [], 8: []}, {3: [fired], 8: []})


SUITE = [
    *incidents(),
    *replicas(),
    *turbulence(),
    *nan(),
    *vectors(),
    *counted(),
    *events(),
    *scores(),
    *lifecycle(),
    *hardware(),
    *self_check(),
]
