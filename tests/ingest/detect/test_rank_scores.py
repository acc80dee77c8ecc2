"""Rules between ranks, evaluated for the bodies of polls; an oracle computes the scores value by value."""

import itertools
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from tests.ingest.builders import registration
from tests.ingest.conftest import encode_records
from tests.ingest.detect.test_run_monitor import Host, events_of

from rankscope_contract.model.schema import WIRE_COUNT_OPS, WIRE_VALUE_OPS, Plan, PlanEntry
from rankscope_contract.rules.score import RANKS_RULES
from rankscope_ingest.detect import rank_scores
from rankscope_ingest.detect.rank_scores import RankScores
from rankscope_ingest.detect.run_monitor import RecordSink
from rankscope_ingest.pipeline.rows import Stamp
from rankscope_ingest.record_channel.bodies import PlanColumns, RowContext, check
from rankscope_ingest.record_channel.client import open_stream

KEY = "r", 0
RULES = {rule.name: rule for rule in RANKS_RULES}
LOCAL, REPLICAS = "grad_unreduced", ("grad_reduced", "exp_avg", "param_after")
KINDS = (LOCAL, *REPLICAS)
NAMES = ("embed", "qkv", "up", "norm")


def plan_of(names=NAMES, placements=("partial", "replica"), shape=(8, 8), reverse=False):
    entries = [
        PlanEntry(kind, name, None, None, None, None, placements[kind != LOCAL], None, "float32", shape)
        for name in names
        for kind in KINDS
    ]
    return PlanColumns(Plan(tuple(entries[::-1] if reverse else entries)))


class Training:
    """Statistics of replicas that agree, and of local gradients that do not: by step, a dict for each rank."""

    def __init__(self, ranks=2, seed=1, names=NAMES):
        self.random, self.ranks, self.names = np.random.default_rng(seed), ranks, names

    def step(self):
        found = [{} for _ in range(self.ranks)]
        for name in self.names:
            shared = {kind: [float(np.float32(x)) for x in self.random.uniform(0.5, 2.0, 4)] for kind in REPLICAS}
            for own in found:
                for kind, (norm, low, high, mean) in shared.items():
                    own[kind, name] = {"norm": norm, "min": -low, "max": high, "mean": mean / 9, "zeros": 0}
                norm = float(np.float32(math.exp(self.random.normal(0.0, 0.1))))
                zeros = int(self.random.integers(0, 9))
                own[LOCAL, name] = {"norm": norm, "min": -1.0, "max": 1.0, "mean": 0.1, "zeros": zeros}
        return found


def unchanged(step, found):
    pass


class Service:
    """Passes the statistics of each rank to `RankScores` as it gets them from a poll."""

    def __init__(self, rules=RANKS_RULES, ranks=2, order=-1):
        self.scores, self.events = RankScores(rules), []
        self.order = order  # in which the ranks are polled
        self.live = set(range(ranks))
        self.plans = dict.fromkeys(range(ranks), plan_of())
        self.ordinals = itertools.count()

    def body(self, rank, step, stats):
        plan = self.plans[rank]
        records = []
        for number, own in enumerate(stats if isinstance(stats, list) else [stats]):
            rows = [own.get((entry.kind, entry.tensor)) for entry in plan.entries]
            values = [None if row is None else row.get(op) for op in WIRE_VALUE_OPS for row in rows]
            full = {"nans": 0, "infs": 0, "numel": 64}
            counts = [None if row is None else (full | row)[op] for op in WIRE_COUNT_OPS for row in rows]
            record = {"seq": step + number, "step": step + number, "ts": 0, "plan": "p"}
            records.append(record | {"values": values, "counts": counts})
        table = open_stream(encode_records(records))
        context = RowContext(run="r", attempt=0, rank=rank, incarnation=f"i{rank}")
        return check(table, {"p": plan}, context, after=step - 1, first_ordinal=0)

    def deliver(self, rank, step, stats):
        self.scores.add(KEY, rank, self.body(rank, step, stats))

    def check(self):
        found = list(self.scores.check({KEY: self.live}, lambda: Stamp(0, next(self.ordinals))))
        self.events += found
        return found

    def train(self, training, steps, change=unchanged):
        """Train `steps`; each poll has 20 of them."""
        for first in steps[::20]:
            polls = [[] for _ in range(training.ranks)]
            for step in range(first, min(first + 20, steps.stop)):
                found = training.step()
                change(step, found)
                for poll, own in zip(polls, found, strict=True):
                    poll.append(own)
            for rank, poll in list(enumerate(polls))[:: self.order]:
                self.deliver(rank, first, poll)
            self.check()

    @property
    def named(self):
        return [(event["rule"], event["step"], event["rank"], event["tensor"]) for event in self.events]


class Level:
    """The robust moving level of one series."""

    def __init__(self):
        self.m = self.s = 0.0
        self.n = 0

    def z(self, x, rate=0.003):
        m, s = (self.m, self.s) if self.n else (x, 0.0)
        away = x - m
        size = abs(away) if self.n < 20 else min(abs(away), 3 * s)
        a = max(1 / (self.n + 1), rate)
        self.m, self.s, self.n = m + a * math.copysign(size, away), s + a * (size - s), self.n + 1
        return away / s if self.n > 60 else None


def held(zs):
    last = [None if z is None else max(-3.0, min(3.0, z)) for z in zs[-40:]]
    return None if len(last) < 40 or None in last else sum(last) / math.sqrt(40)


class Oracle:
    """The scores of all steps so far: a value for each rank and tensor, None if it is not judged."""

    def __init__(self, ranks):
        self.ranks = range(ranks)
        self.gaps, self.between = [], {}

    def add(self, found):
        scores = {}
        shares = {(r, n): found[r][LOCAL, n]["zeros"] / 64 for r in self.ranks for n in NAMES}
        logs = {(r, n): math.log(found[r][LOCAL, n]["norm"]) for r in self.ranks for n in NAMES}
        away = {(r, n): logs[r, n] - statistics.median(logs[r, one] for one in NAMES) for r, n in logs}
        self.gaps.append({(r, n): shares[r, n] - self.mean(shares, r, n) for r, n in shares})
        for (r, n), value in away.items():
            level, zs = self.between.setdefault((r, n), (Level(), []))
            zs.append(level.z(value - self.mean(away, r, n)))
        for r, n in shares:
            lone = [max(step.values()) for step in self.gaps[:-2]][-30:]
            two = min(step[r, n] for step in self.gaps[-2:])
            scores["ZerosGap", r, n] = two - max(lone) if len(lone) == 30 else None
            scores["ReplicasApart", r, n] = max(self.apart(found, r, n, kind) for kind in REPLICAS)
            gap = held(self.between[r, n][1])
            scores["GradGap", r, n] = None if gap is None else abs(gap)
        return scores

    def mean(self, values, r, n):
        return statistics.fmean(values[one, n] for one in self.ranks if one != r)

    def apart(self, found, r, n, kind):
        rows = [found[one][kind, n] for one in self.ranks]
        middle = {op: statistics.median(row[op] for row in rows) for op in ("norm", "min", "max", "mean")}
        rms = middle["norm"] / math.sqrt(64)
        return max(abs(rows[r][op] - x) / (x if op == "norm" else rms) for op, x in middle.items())


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_scores_are_those_of_the_formulas(name, ranks):
    """A rule without a limit fires at each step, for each tensor with the largest score of the ranks."""
    service = Service([replace(RULES[name], above=-1e9, latch=0)], ranks)
    training, oracle, expected = Training(ranks), Oracle(ranks), {}

    def change(step, found):
        if step % 7 == 0:
            found[ranks - 1]["exp_avg", "qkv"]["mean"] += 1e-3 * step
        found[0][LOCAL, "up"]["norm"] *= 1.01 ** max(0, step - 100)
        found[1][LOCAL, "norm"]["zeros"] += 40 * (step % 50 in (40, 41))
        for (rule, _, tensor), score in oracle.add(found).items():
            if rule == name and score is not None:
                expected[step, tensor] = max(score, expected.get((step, tensor), -math.inf))

    service.train(training, range(130), change)
    assert len(expected) >= 4 * 30
    assert expected == {
        (one["step"], one["tensor"]): pytest.approx(one["value"], rel=1e-5, abs=1e-6) for one in service.events
    }


def zeros(rank, names, steps):
    def change(step, found):
        for name in names if step in steps else ():
            found[rank][LOCAL, name]["zeros"] = 64

    return change


def part(rank, kind, steps, op="mean", by=1e-3):
    def change(step, found):
        if step in steps:
            found[rank][kind, "qkv"][op] += by

    return change


def drifts(rank):
    def change(step, found):
        found[rank][LOCAL, "up"]["norm"] *= 1.03 ** max(0, step - 120)

    return change


LASTING = range(120, 300)


@pytest.mark.parametrize(("ranks", "order"), [(2, 1), (2, -1), (3, -1)])
@pytest.mark.parametrize(
    ("change", "rule", "step", "rank", "tensors", "kind"),
    [
        (zeros(1, ["up"], LASTING), "ZerosGap", 121, 1, ["up"], LOCAL),
        (zeros(1, NAMES, LASTING), "ZerosGap", 121, 1, [*NAMES], LOCAL),
        (part(1, "param_after", LASTING, "max"), "ReplicasApart", 120, "odd", ["qkv"], "param_after"),
        (part(1, "exp_avg", range(120, 121), "norm", 1e30), "ReplicasApart", 120, "odd", ["qkv"], "exp_avg"),
        (drifts(1), "GradGap", None, "odd", ["up"], LOCAL),
    ],
)
def test_fault_has_one_event_with_rank_tensor_and_kind(ranks, order, change, rule, step, rank, tensors, kind):
    service = Service(ranks=ranks, order=order)
    service.train(Training(ranks), range(200), change)
    blamed = (1 if ranks > 2 else None) if rank == "odd" else rank

    assert {(rule, blamed, kind, "score", RULES[rule].above)} == {
        tuple(event[name] for name in ("rule", "rank", "kind", "op", "threshold")) for event in service.events
    }
    assert sorted(tensors) == sorted(event["tensor"] for event in service.events)
    assert {step or service.events[0]["step"]} == {event["step"] for event in service.events}
    assert all(("ranks 0-1" if blamed is None else "rank 1") in event["message"] for event in service.events)


def lone_gaps(step, found):
    """The experts `up` and `norm` get no tokens in a tenth of the steps, and `up` of rank 1 in several in a row."""
    for rank, own in enumerate(found):
        for name in ("up", "norm"):
            if (step * 7 + 3 * rank + len(name)) % 10 == 0 or (
                rank == 1 and name == "up" and step % 40 in (10, 11, 12)
            ):
                own[LOCAL, name]["zeros"] = 64


def from_the_start(step, found):
    found[1][LOCAL, "up"]["zeros"] = 64
    found[1]["param_after", "qkv"]["mean"] += 0.1


@pytest.mark.parametrize("change", [unchanged, lone_gaps, from_the_start])
def test_healthy_training_is_silent(change):
    service = Service(ranks=3)
    service.train(Training(3), range(260), change)

    assert [] == service.events


def only_first(step, found):
    found[1].clear()


@pytest.mark.parametrize(
    ("plans", "change"),
    [
        ([plan_of()] * 2, only_first),  # one rank only
        ([plan_of(placements=("shard", "shard"))] * 2, unchanged),
        ([plan_of(placements=("full", "full"))] * 2, unchanged),  # parameters that DDP ignores
        ([plan_of(["embed", "qkv"]), plan_of(["up", "norm"])], unchanged),  # stages of a pipeline
        ([plan_of(), plan_of(shape=(4, 8))], unchanged),
    ],
)
def test_tensors_that_differ_rightly_are_not_compared(plans, change):
    service = Service([replace(rule, above=-1e9, latch=0) for rule in RANKS_RULES])
    service.plans = dict(enumerate(plans))
    service.train(Training(), range(40), change)

    assert [] == service.events


def test_parts_are_compared_within_themselves_and_other_plans_by_tensor_name():
    """Ranks 0 and 1 are one stage, 2 and 3 the other; the plan of rank 1 has another order, and later fewer tensors."""
    service = Service(ranks=4)
    first, second = ["embed", "qkv"], ["up", "norm"]
    service.plans = dict(enumerate([plan_of(first), plan_of(first, reverse=True), plan_of(second), plan_of(second)]))

    def change(step, found):
        if step == 60:
            service.plans[1] = plan_of(["qkv"])
        zeros(1, ["qkv"], range(90, 95))(step, found)
        part(3, "param_after", range(90, 95))(step, [*found[:3], {(k, "qkv"): found[3][k, "norm"] for k in KINDS}])

    service.train(Training(4), range(100), change)

    assert [("ReplicasApart", 90, None, "norm"), ("ZerosGap", 91, 1, "qkv")] == service.named


@pytest.mark.parametrize("is_lost", [False, True])
def test_step_waits_for_a_late_rank_until_it_is_lost(is_lost):
    service, training = Service(ranks=3), Training(3)
    service.train(training, range(30))
    late = []
    for step in range(30, 50):
        found = training.step()
        part(1, "exp_avg", range(40, 60))(step, found)
        late.append(found[2])
        for rank in (0, 1):
            service.deliver(rank, step, found[rank])
        service.check()
    before = service.named
    if is_lost:
        service.live.remove(2)
    else:
        service.deliver(2, 30, late)  # one poll with 20 steps
    service.check()

    assert [] == before
    assert [("ReplicasApart", 40, None if is_lost else 1, "qkv")] == service.named
    service.deliver(2, 49, late[-1])  # known already
    assert [] == service.check()


def test_rank_far_behind_is_left_out_and_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(rank_scores, "KEPT_STEPS", 10)
    service, training = Service(ranks=3), Training(3)
    for step in range(60):
        found = training.step()
        part(1, "exp_avg", range(40, 60))(step, found)
        for rank in (0, 1):
            service.deliver(rank, step, found[rank])
        service.check()

    assert [("ReplicasApart", 40, None, "qkv")] == service.named
    assert {KEY: 10} == service.scores.waiting
    assert [] == list(service.scores.check({}, lambda: Stamp(0, 0)))
    assert {} == service.scores.waiting


def test_firing_becomes_an_event_and_an_incident():
    host, training, service = Host(), Training(), Service()
    monitor = host.monitor()
    for rank in range(2):
        process = registration(rank=rank, world_size=2, local_rank=0, incarnation=f"i{rank}")
        monitor.accept(process, ())
    sink, opened = RecordSink(monitor), []
    for step in range(40):
        found = training.step()
        part(1, "exp_avg", range(30, 40))(step, found)
        for rank in range(2):
            target = monitor.registry.get(f"i{rank}")
            sink.on_answer(target)
            body = service.body(rank, step, found[rank])
            sink.on_body(target, body, {"p": service.plans[rank]}, size=1, inflated=1)
        host.now += 1.0
        opened += monitor.due_incidents()
    (event,) = events_of(monitor, "anomaly")

    assert ("ReplicasApart", 30, None, "exp_avg", "qkv") == tuple(
        event[name] for name in ("rule", "step", "rank", "kind", "tensor")
    )
    assert [("ReplicasApart", "critical", "ranks 0-1", 30)] == [
        (one.first.rule, one.severity, one.first.ranks_named, one.first.step) for one in opened
    ]
