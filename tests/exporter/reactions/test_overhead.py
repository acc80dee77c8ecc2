"""The reported overhead equals the additional CPU time, and the long-run overhead remains below the limit."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exporter.parts import Training
from tests.programs import run_program
from tests.properties import examples

from rankscope_exporter import ConfigError, MonitorConfig
from rankscope_exporter.base.validation import share_of
from rankscope_exporter.reactions.overhead_window import LEAST_SECONDS, MOST_STRETCH, PATIENCE, OverheadWindow, Verdict

PROGRAM = """
import json, os, statistics, sys, time, urllib.request
reader, writer = os.pipe()
reading = os.fork() == 0  # before any thread is started: reading a page must not count
if reading:
    os.close(writer)
    for url in os.fdopen(reader):
        for path in ("/metrics", "/records?after=-1"):
            request = urllib.request.Request(url.strip() + path, headers={"Rankscope-Schema": "1"})
            try:
                urllib.request.urlopen(request, timeout=60).read()
            except OSError:
                pass
    os._exit(0)
os.close(reader)
pages = os.fdopen(writer, "w", buffering=1)
import torch
from torch import nn
from rankscope_exporter import Monitor, MonitorConfig

STEPS, PAIRS, PAGES = 40, 2, 5
inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
config = MonitorConfig(console=False, exit_wait_seconds=0, statistics="torch", hang_after_seconds=0)

def train(net, optimizer, monitor, steps):
    for step in range(steps):
        loss = net(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss, tokens=8)
        monitor.batch([step])
        if monitor.address and step % (STEPS // PAGES) == 0:
            print(monitor.address, file=pages)

def seconds(*, attached):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(12)])
    optimizer = torch.optim.Adam(net.parameters())
    monitor = Monitor(config)
    if attached:
        monitor.attach(net, optimizer)
    train(net, optimizer, monitor, 5)  # what is made once is made here
    if attached:
        monitor._session.publisher.catch_up(60)
        time.sleep(0.2)
    before, own = time.process_time(), sum(monitor.overhead_seconds().values())
    train(net, optimizer, monitor, STEPS)
    if attached:
        monitor.end_step()
        monitor._session.publisher.catch_up(60)
        time.sleep(0.2)  # for the last page
    result = time.process_time() - before, sum(monitor.overhead_seconds().values()) - own
    by_thread = monitor.overhead_seconds()
    monitor.detach()
    return *result, by_thread

seconds(attached=True)  # the first of all imports and makes more
ratios = []
for _ in range(PAIRS):
    bare, _, _ = seconds(attached=False)
    whole, own, by_thread = seconds(attached=True)
    ratios.append(own / (whole - bare))
share = (whole - bare) / whole
print(json.dumps({"ratio": statistics.mean(ratios), "ratios": ratios, "share": share, "by": by_thread}))
"""


@pytest.mark.thorough
def test_reported_overhead_equals_extra_cpu_time_within_30_percent():
    """Compares CPU time, not wall time. Most work of the process is that of the monitor, so the noise is small."""
    done = run_program(PROGRAM, seconds=300)
    assert 0 == done.returncode, done.stderr
    paired = json.loads(done.stdout)

    assert paired["share"] > 0.4, paired
    assert 0.7 <= paired["ratio"] <= 1.3, paired
    assert all(paired["by"][name] > 0 for name in ("attach", "hooks", "publisher", "http")), paired


def test_calls_of_the_script_count_as_overhead():
    """A call of log() that takes 50 ms."""
    with Training() as training:
        before = training.monitor.overhead_seconds()["hooks"]
        training.monitor.log(loss=_Slow())
        spent = training.monitor.overhead_seconds()["hooks"] - before

    assert 0.05 <= spent


class _Slow:
    def __float__(self) -> float:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        return 1.0


_MEASUREMENT = """
import time

import torch

from rankscope_exporter import Monitor
from rankscope_exporter.training.cpu_time import IntraOpThreads

torch.set_num_threads(2)
team, tensor = IntraOpThreads(), torch.ones(1 << 22)
team.find()
tensor.add(tensor)
assert 0.0 == team.seconds
own = time.thread_time()
team.on_measurement_begin()
for _ in range(20):
    tensor.add(tensor)
team.on_measurement_end()
own = time.thread_time() - own
assert 1 == len(team._clocks), team._clocks
assert 0.1 * own < team.seconds, (own, team.seconds)

net = torch.nn.Linear(2048, 2048)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
settings = {"quantities": ["parameters"], "statistics": "torch", "console": False, "exit_wait_seconds": 0}
with Monitor(settings).attach(net, optimizer) as monitor:
    net(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    assert 0.0 < monitor.overhead_seconds()["intra_op"]
"""


def test_torch_threads_count_only_during_measurements():
    """In a forked process with one import of torch: for a tensor, and in a training."""
    done = run_program(_MEASUREMENT)

    assert 0 == done.returncode, done.stderr


def test_stored_overhead_equals_the_metrics_page():
    """There is a row for each thread at intervals."""
    with Training() as training:
        training.train()
        training.publish()
        shown = training.monitor.overhead_seconds()
        rows = [s for record in training.records for s in record.scalars if s.name == "overhead_seconds"]
    stored = {row.labels["thread"]: row.value for row in rows}

    assert {"hooks", "publisher", "attach", "intra_op"} <= stored.keys() <= shown.keys()
    assert all(0 <= value <= shown[name] for name, value in stored.items())
    assert 0 == training.faults


class SimulatedTraining:
    """A training with a given time per step. Every k-th step is sampled and costs more. Applies results immediately."""

    def __init__(self, allowed: float, *, step: float, sampled: float, idle: float, every: int = 1) -> None:
        self.window = OverheadWindow(allowed)
        self.step, self.sampled, self.idle, self.every = step, sampled, idle, every
        self.now = self.cost = 0.0
        self.seen = 0
        self.changes: list[tuple[float, int, int]] = []  # time, previous and new factor
        self.looks: list[tuple[float, float, float]] = []  # time, cost, share

    def train(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self._begins()
            spent = self.idle + (self.sampled if self.seen % (self.every * self.window.stretch) == 0 else 0.0)
            self.seen += 1
            self.cost += spent
            self.now += self.step + spent

    def _begins(self) -> None:
        if self.window.may_end(self.every * self.window.stretch):
            result = self.window.evaluate(self.now, self.cost)
            if result is not None:
                self.looks.append((self.now, self.cost, result.share))
                if result.verdict is not Verdict.KEEPS:
                    self.changes.append((self.now, self.window.stretch, result.stretch))
                    self.window.restart(result.stretch)


@pytest.mark.parametrize(
    ("given_as", "expected"),
    [(0.01, 0.01), ("1 %", 0.01), ("1%", 0.01), (" 0.5 % ", 0.005), (".5%", 0.005), (None, None)],
)
def test_share_accepts_percent_and_fraction(given_as, expected):
    assert expected == share_of(given_as)


@pytest.mark.parametrize("wrong", [0, 1, 1.0, -0.1, "1", "one percent", True, float("nan"), "0 %", "100 %", [0.01]])
def test_invalid_share_raises_with_an_example(wrong):
    with pytest.raises(ConfigError, match=r"such as 0.01 or \"1 %\""):
        MonitorConfig(max_overhead=wrong)


def test_overhead_below_the_limit_changes_nothing():
    training = SimulatedTraining(0.01, step=0.1, sampled=0.0005, idle=0.0)
    training.train(600)

    assert [] == training.changes


def test_interval_is_halved_after_consecutive_low_windows():
    """A sampled step costs 10 ms more than the 100 ms of a step; one in 16 costs 0.6 %.

    Then steps become 16 times as long, as with a larger batch: the share falls below 0.04 %.
    """
    training = SimulatedTraining(0.01, step=0.1, sampled=0.01, idle=0.0)
    training.train(600)
    ((stretched_at, *_),) = training.changes
    training.step = 1.6
    training.train(8000)

    assert [(1, 16), (16, 8), (8, 4), (4, 2), (2, 1)] == [(before, after) for _, before, after in training.changes]
    gaps = [later[0] - earlier[0] for earlier, later in zip(training.changes[1:], training.changes[2:], strict=False)]
    assert stretched_at == pytest.approx(LEAST_SECONDS, rel=0.2)
    assert min(gaps) >= PATIENCE * LEAST_SECONDS


def test_overhead_not_from_sampling_ends_at_the_largest_stretch():
    training = SimulatedTraining(0.01, step=0.01, sampled=0.0001, idle=0.001)
    training.train(600)

    assert MOST_STRETCH == training.window.stretch
    assert MOST_STRETCH == training.changes[-1][2]


@settings(deadline=None, max_examples=examples(40))
@given(
    allowed=st.sampled_from([0.001, 0.01, 0.1]),
    step=st.floats(0.005, 2.0),
    times=st.floats(0.01, 100.0),
    idle_share=st.floats(0.0, 0.3),
    every=st.integers(1, 5),
)
def test_long_run_overhead_is_below_the_limit_and_sampling_settles(allowed, step, times, idle_share, every):
    """A sampled step costs `times` the limit, each step `idle_share` of the limit: a finite factor is sufficient."""
    training = SimulatedTraining(
        allowed, step=step, sampled=allowed * step * times, idle=allowed * step * idle_share, every=every
    )
    training.train(40 * LEAST_SECONDS + 4000 * step)
    began, cost = training.now, training.cost
    changes = len(training.changes)
    training.train(40 * LEAST_SECONDS + 4000 * step)

    assert training.cost - cost <= allowed * (training.now - began) + training.sampled
    assert changes == len(training.changes)


@settings(deadline=None, max_examples=examples(40))
@given(st.lists(st.tuples(st.floats(0.0001, 0.05), st.floats(30.0, 300.0)), min_size=1, max_size=6))
def test_interval_is_halved_no_faster_than_patience(costs):
    training = SimulatedTraining(0.01, step=0.05, sampled=0.0, idle=0.0)
    for sampled, seconds in costs:
        training.sampled = sampled
        training.train(seconds)

    tightened = [(when, before, after) for when, before, after in training.changes if after < before]
    assert all(before == 2 * after for _, before, after in tightened)
    everything = [0.0, *(when for when, _, _ in training.changes)]
    for when, _, _ in tightened:
        assert when - max(moment for moment in everything if moment < when) >= PATIENCE * LEAST_SECONDS
