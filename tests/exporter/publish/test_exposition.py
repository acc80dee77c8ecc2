"""The metrics page and its latest values, compared with a golden file, with promtool and with prometheus_client."""

import gc
import gzip
import math
import re
import subprocess
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.properties import examples

from rankscope_contract.metrics.catalogue import CATALOG
from rankscope_contract.model.events import Event, EventType
from rankscope_contract.model.identity import Identity
from rankscope_contract.model.schema import PlanEntry
from rankscope_contract.rules.anomaly import AnomalyNan, AnomalyTurbulence
from rankscope_exporter.publish.exposition import (
    MAX_ANOMALY_SERIES,
    MAX_SCALAR_SERIES,
    ExporterStats,
    Exposition,
    LatestValues,
)
from rankscope_exporter.records.record import Scalar, StepRecord

GOLDEN = Path(__file__).parents[2] / "golden" / "exporter_page.txt"
RULES = (AnomalyNan(), AnomalyTurbulence(threshold=3.0))
NASTY = 'la"yer\\s.0\n{a="b", } 学习 #'


class Bench:
    """A page without a server, and its samples as parsed by prometheus_client."""

    def __init__(self, *, run="run-1", rules=RULES, standing=None, series_budget=20_000, **options):
        who = {"run": run, "rank": 3, "local_rank": 1, "world_size": 4}
        identity = Identity(launch_id="launch-1", host="node-1", incarnation="feedc0de", **who)
        self.now = 100.0
        self.live = LatestValues(rules, clock=lambda: self.now)
        stats = ExporterStats(**standing or {})
        self.page = Exposition(identity, self.live, lambda: stats, rules=rules, series_budget=series_budget, **options)

    @property
    def text(self) -> str:
        return b"".join(bytes(piece) for piece in self.page.pieces()).decode()

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the samples of `name` by their label values, in the order of the catalogue."""
        labels = CATALOG[name].labels
        return {
            tuple(sample.labels.get(label, "") for label in labels): sample.value
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
            if sample.name == name
        }


ANOMALY = Event(type=EventType.ANOMALY, rule="AnomalyNan", kind="grad_reduced", tensor=NASTY, op="nans")


def _filled(record) -> Bench:
    standing = {"faults": 1, "dropped": {"ring_overrun": 0}, "overhead_seconds": {"publisher": 0.25}}
    standing |= {"ring_records": 3, "ring_uncommitted": 2}
    bench = Bench(standing=standing, planned_steps=100, device="cpu")
    entries = [PlanEntry(kind="grad_reduced", tensor=name) for name in ("wte.weight", NASTY, "absent")]
    entries.append(PlanEntry(kind="exp_avg", tensor="wte.weight"))
    numbers = {"norm": 0.1, "min": -1.0, "max": 1.0, "mean": -2.5e-9, "norm_baseline": 0.3, "mean_baseline": 1e30}
    numbers |= {"nans": 0, "infs": 2, "zeros": 7, "numel": 12}
    overflown = {"norm": math.inf, "mean": -math.inf, "nans": 1 << 40, "numel": 12}
    bench.live.update(record(7, entries, [numbers, overflown, None, {}]))
    scalars = (
        Scalar("loss", math.nan, labels={"loss": "lm"}),
        Scalar("loss", 1.5, labels={"loss": "lm", "split": "val"}),
        Scalar("learning_rate", 3e-4, labels={"group": "0"}),
        Scalar("grad_norm", math.inf),
        Scalar("tokens_total", 1_000_000.0, "tokens"),
        Scalar("my scalar", -math.inf),
    )
    events = (ANOMALY, Event(type=EventType.STEP_SKIPPED))
    bench.live.update(record(8, scalars=scalars, events=events, firing=frozenset({("AnomalyNan", "grad_reduced")})))
    return bench


def test_features_above_the_limit_are_left_out_and_counted(record):
    bench = Bench()
    rows = [{"kind": "stable_rank", "module": f"layer.{at}", "index": None, "value": 2.0} for at in range(501)]
    bench.live.update(record(1, features=tuple(rows)))
    values = bench.samples("rankscope_feature_value")

    assert 2.0 == values["stable_rank", "layer.0", "max"]
    assert (1000, 2) == (len(values), bench.samples("rankscope_dropped_total")["series_budget",])

    bench.live.update(record(2, features=tuple(rows[:1])))

    assert 2 == bench.samples("rankscope_dropped_total")["series_budget",]  # a counter does not decrease


class Hash(str):
    """A hash of which the living objects can be counted."""

    __slots__ = ("__weakref__",)


def test_plans_of_earlier_values_are_not_kept(live, record):
    kept = weakref.WeakSet()
    for step in range(100):
        new = record(step, [PlanEntry(kind="grad_reduced", tensor=f"t{step}")], [{}])
        plan = replace(new.statistics.plan, hash=Hash(step))
        kept.add(plan.hash)
        live.update(replace(new, statistics=replace(new.statistics, plan=plan)))
        del new, plan
    gc.collect()

    assert {"98", "99"} >= set(kept)  # the latest plan, and that of the values before


def test_page_equals_the_golden_file_and_passes_promtool_check(record, require_server):
    page = _filled(record).text

    assert GOLDEN.read_text(encoding="utf-8") == re.sub(r"(rankscope_build_info\{).*(\})", r"\1…\2", page)
    check = [require_server("promtool", "prometheus"), "check", "metrics"]
    checked = subprocess.run(check, input=page.encode(), capture_output=True, check=False)
    assert (0, b"", b"") == (checked.returncode, checked.stdout, checked.stderr)


def test_age_of_the_latest_firing_grows_until_the_next_one(record):
    bench = _filled(record)
    bench.now += 30
    fired = {("AnomalyNan", "grad_reduced"): 30.0}

    assert fired == bench.samples("rankscope_anomaly_age_seconds")

    bench.live.update(record(9, events=(ANOMALY,)))
    assert dict.fromkeys(fired, 0.0) == bench.samples("rankscope_anomaly_age_seconds")


def test_each_metric_has_the_labels_of_the_catalogue(record):
    for family in text_string_to_metric_families(_filled(record).text):
        for sample in family.samples:
            spec = CATALOG[sample.name]
            assert set(spec.all_labels) == set(sample.labels)
            assert ("run-1", "3") == (sample.labels["run"], sample.labels["rank"])
            assert (spec.type, spec.help) == (family.type, family.documentation)


def test_page_without_records_is_valid_and_a_lone_surrogate_is_replaced(record):
    bench = Bench()

    assert {} == bench.samples("rankscope_tensor_value")
    assert {} == bench.samples("rankscope_step")
    assert {("AnomalyNan", ""): 0} == bench.samples("rankscope_anomaly_events_total")

    bench.live.update(record(0, scalars=(Scalar("bad \ud800 name", 1.0),)))
    assert {("bad ? name",): 1.0} == bench.samples("rankscope_scalar")


def test_page_ops_selects_the_ops_of_the_page(record):
    entries, numbers = [PlanEntry(kind="act_out", tensor="a")], [{"norm": 1.0, "max": 2.0}]
    shown = []
    for bench in (Bench(rules=()), Bench(), Bench(rules=(AnomalyNan(threshold=9.0),)), Bench(all_ops=True)):
        bench.live.update(record(0, entries, numbers))
        shown.append({op for _, _, op in bench.samples("rankscope_tensor_value")})

    judged = {"norm", "nans", "infs"}
    assert [{"norm"}, judged, judged | {"max"}] == [ops - {"numel"} for ops in shown[:3]]
    assert judged | {"max", "zeros", "numel"} == shown[3]


def test_series_above_the_budget_are_counted_once(record):
    entries = [PlanEntry(kind="act_out", tensor=f"t{number}") for number in range(10)]
    bench = Bench(series_budget=12)
    for step in range(3):
        bench.live.update(record(step, entries, [{"norm": 1.0, "mean": 0.0, "norm_baseline": 1.0}] * 10))
        shown = bench.samples("rankscope_tensor_value")
        dropped = bench.samples("rankscope_dropped_total")

    assert {"t0", "t1"} == {tensor for _, tensor, _ in shown}
    assert {("series_budget",): 48, ("series_ambiguous",): 0} == dropped


def test_parts_have_labels_and_chunks_do_not_repeat_a_series(record):
    """Entries with equal labels are shown once, a whole tensor before a part of that name; others are counted."""
    entries = [
        PlanEntry(kind="act_out", tensor="a", index=0),
        PlanEntry(kind="act_out", tensor="a"),
        PlanEntry(kind="act_out", tensor="b", vpp_stage=0),
        PlanEntry(kind="act_out", tensor="b", vpp_stage=1),
        PlanEntry(kind="act_out", tensor="a", index=1),
        PlanEntry(kind="act_out", tensor="a[1]"),
    ]
    bench = Bench()
    bench.live.update(record(0, entries, [{"norm": float(number)} for number in range(6)]))
    norms = {key[1]: value for key, value in bench.samples("rankscope_tensor_value").items() if key[2] == "norm"}

    assert {"a[0]": 0.0, "a": 1.0, "b": 2.0, "a[1]": 5.0} == norms
    assert 4 == bench.text.count('op="norm"')
    assert 2 == bench.samples("rankscope_dropped_total")[("series_ambiguous",)]


def test_page_shows_the_last_micro_batch_and_the_first_call(record):
    """A step with fewer micro-batches than the plan shows its own last one, and no series occurs twice."""
    calls = [(micro, call) for micro in range(3) for call in (None, 1)]
    entries = [PlanEntry(kind="act_out", tensor="a", micro_step=micro, call_seq=call) for micro, call in calls]
    entries += [PlanEntry(kind="grad_unreduced", tensor="w", micro_step=micro) for micro in (0, None)]
    bench = Bench()
    seen = []
    for step, micro_batches in enumerate((3, 2, 1, 0)):
        numbers = [{"norm": float(position)} if position < 2 * micro_batches else None for position in range(6)]
        bench.live.update(record(step, entries, [*numbers, {"norm": 7.0}, {"norm": 8.0}]))
        values = bench.samples("rankscope_tensor_value")
        assert bench.text.count('op="norm"') == len({key for key in values if key[2] == "norm"})
        seen.append({key[1]: value for key, value in values.items() if key[2] == "norm"})

    assert [{"a": 4.0, "w": 8.0}, {"a": 2.0, "w": 8.0}, {"a": 0.0, "w": 8.0}, {"w": 8.0}] == seen
    assert 0 == bench.samples("rankscope_dropped_total")[("series_ambiguous",)]


_labels = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=12)


@settings(deadline=None)
@given(names=st.tuples(_labels, _labels, _labels, _labels), value=st.floats(width=32))
def test_any_name_and_value_round_trips(record, names, value):
    run, tensor, kind, scalar = names
    bench = Bench(run=run)
    entries = [PlanEntry(kind=kind, tensor=tensor)]
    bench.live.update(record(0, entries, [{"norm": value}], scalars=(Scalar(f"s{scalar}", 1.0),)))
    shown = bench.samples("rankscope_tensor_value")[kind, tensor, "norm"]

    assert value == shown or (math.isnan(value) and math.isnan(shown))
    assert (f"s{scalar}",) in bench.samples("rankscope_scalar")


ACCEPT = [(None, False), ("deflate, gzip;q=0", False), ("deflate, GZIP;q=0.5", True)]


@pytest.mark.parametrize(("accept", "packed"), ACCEPT)
def test_page_is_compressed_if_the_client_accepts_gzip(rank, record, accept, packed):
    rank.channel.publish(record(0, [PlanEntry(kind="act_out", tensor="a")], [{"norm": 1.0}]))
    got = rank.get("/metrics", **({"Accept_Encoding": accept} if accept else {}))
    text = gzip.decompress(got.body) if packed else got.body

    assert ("gzip" if packed else None) == got.headers["Content-Encoding"]
    assert "text/plain; version=0.0.4; charset=utf-8" == got.headers["Content-Type"]
    assert len(got.body) == int(got.headers["Content-Length"])
    assert b'op="norm"} 1\n' in text or b'op="norm"} 1.0\n' in text


def test_page_never_mixes_two_steps_of_a_kind(rank, record):
    """In scrapes during publishing, all values of a kind equal the step that rankscope_kind_step shows."""
    entries = [PlanEntry(kind=kind, tensor=f"t{number}") for kind in ("act_in", "act_out") for number in range(50)]
    done = threading.Event()

    def publish():
        step = 0
        while not done.is_set():
            kinds = entries if step % 3 else entries[:50]
            rank.channel.publish(record(step, kinds, [{"norm": float(step), "numel": 1}] * len(kinds)))
            step += 1

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        pages = [rank.get("/metrics").text for _ in range(examples(60))]
    finally:
        done.set()
        publisher.join()

    steps = set()
    for page in pages:
        kind_steps = dict(re.findall(r'^rankscope_kind_step\{kind="(\w+)".*\} (\d+)\.0$', page, re.MULTILINE))
        norms = re.findall(r'^rankscope_tensor_value\{.*kind="(\w+)".*op="norm"\} (\d+)(?:\.0)?$', page, re.MULTILINE)
        assert {(kind, kind_steps[kind]) for kind in kind_steps} == set(norms)
        assert len(kind_steps) * 50 == len(norms)
        steps |= set(kind_steps.values())
    assert len(steps) > 2
    assert [] == rank.faults


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
    live.update(record(0, [GRADIENT], ONE, firing=frozenset({gradient, scalar}), scalars=(Scalar("loss", math.nan),)))
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
    assert (MAX_SCALAR_SERIES, 5) == (len(snapshot.scalars), snapshot.left_out)
