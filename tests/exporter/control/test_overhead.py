"""The reported overhead equals the CPU time; above the limit, sampling is less frequent and does not oscillate."""

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exporter import parts
from tests.exporter.parts import Training
from tests.programs import run_program
from tests.properties import examples

from rankscope_exporter.control.overhead_controller import LEAST_SECONDS, PATIENCE, OverheadWindow
from rankscope_exporter.measure import quantities
from rankscope_exporter.measure.quantities.update import Parameters
from rankscope_exporter.measure.table import Table
from rankscope_exporter.process.validation import share_of

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
import torch
from rankscope_exporter import Monitor
torch.set_num_threads(2)
net = torch.nn.Linear(2048, 2048)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
settings = {"quantities": ["parameters"], "statistics": "torch", "console": False, "exit_wait_seconds": 0}
with Monitor(settings).attach(net, optimizer) as monitor:
    net(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    assert 0.0 < monitor.overhead_seconds()["intra_op"]
"""


def test_measurements_in_a_training_count_the_threads_of_torch():
    """In a training, in a forked process. The tests of the process room compare the times of each thread."""
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
            required = self.window.evaluate(self.now, lambda: self.cost)
            if required not in (None, self.window.stretch):
                self.changes.append((self.now, self.window.stretch, required))
                self.window.restart(required)


@pytest.mark.parametrize(
    ("given_as", "expected"),
    [(0.01, 0.01), ("1 %", 0.01), ("1%", 0.01), (" 0.5 % ", 0.005), (".5%", 0.005), (None, None)],
)
def test_share_accepts_percent_and_fraction(given_as, expected):
    assert expected == share_of(given_as)


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


MOST_STEPS = 3000
STEP_SECONDS = 1.0


class Times:
    """A clock and a cost that the test sets, independent of the load of the machine."""

    def __init__(self) -> None:
        self.clock = self.cost = 0.0

    def spend(self, seconds: float) -> None:
        self.clock += seconds
        self.cost += seconds


class Costly(Parameters):
    """A quantity with a cost at every sampled step. Not a direct subclass of Quantity: those are always selectable."""

    name: ClassVar[str] = "test_costly"
    seconds: ClassVar[float] = 0.0
    busy_seconds: ClassVar[float] = 0.0
    times: ClassVar[Times] = Times()

    def on_step_begin(self, table: Table) -> None:
        super().on_step_begin(table)
        self.times.spend(self.seconds)
        until = time.thread_time() + self.busy_seconds
        while time.thread_time() < until:
            pass


@pytest.fixture(autouse=True)
def _offered(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {**quantities.quantity_classes(), Costly.name: Costly}
    monkeypatch.setattr(quantities, "quantity_classes", lambda: classes)
    monkeypatch.setattr(Costly, "times", Times())


class CostlyTraining(parts.Training):
    """A training with the clock of the test. With `real`: with the clock of the machine and short windows."""

    def __init__(self, *, real: bool = False, **settings: Any) -> None:
        base = {"quantities": ["test_costly"], "max_overhead": "50 %", "hang_after_seconds": 0}
        super().__init__(**base | settings)
        self.controller = self.session.overhead_controller
        self.window = self.controller.window
        if not real:
            times = Costly.times
            self.controller.clock, self.controller.cost = lambda: times.clock, lambda: times.cost
        else:
            self.window._least_seconds = 0.2

    def each_step(self, most: int = MOST_STEPS) -> Iterator[int]:
        """Yield the number of each step after it."""
        for step in range(1, most + 1):
            self.train()
            Costly.times.clock += STEP_SECONDS
            yield step

    def changes(self) -> list[dict[str, Any]]:
        events = [event for _, event in self.events("budget")]
        return [{**json.loads(e.details or ""), "severity": e.severity} for e in events]


def test_expensive_quantity_is_sampled_less_often_and_reported(monkeypatch, capfd, reader, eventually):
    """The cost is 30 s at each step of 1 s; half of the time is allowed."""
    monkeypatch.setattr(Costly, "seconds", 30.0)
    training = CostlyTraining(console=True)
    enough = MOST_STEPS
    for step in training.each_step():
        share = training.window.share
        if enough == MOST_STEPS and share is not None and share <= 0.5:
            enough = step + 2 * training.controller.stretch
        if step >= enough:
            break
    stretch = training.controller.stretch
    page = eventually(lambda: reader(training.monitor).get("/metrics").decode())
    measuring = training.monitor.measuring
    training.monitor.detach()
    events, measured = training.changes(), training.measured()
    last = events[-1]

    assert (1, stretch) == (events[0]["was"], last["now"])
    assert all(event["share"] > 0.5 == event["max_overhead"] for event in events)
    assert all(event["now"] >= 2 * event["was"] for event in events)
    assert {"warning"} == {event["severity"] for event in events}
    late = [step for step in measured if step >= last["step"]]
    assert len(late) > 1
    assert {stretch} == {b - a for a, b in itertools.pairwise(late)}
    assert (stretch, 0.5) == (measuring["stretch"], measuring["max_overhead"])
    assert f" {stretch}.0" in next(line for line in page.splitlines() if line.startswith("rankscope_sampling_stretch{"))
    said = capfd.readouterr().err
    assert len(events) == said.count("of the configured steps is sampled: measuring")
    assert f"one in {stretch} of the configured steps is sampled" in said
    assert 0 == training.monitor.faults


def test_cpu_time_of_the_machine_counts_as_overhead(monkeypatch):
    """A busy loop of 20 ms per step exceeds 2 % also on a loaded machine."""
    monkeypatch.setattr(Costly, "busy_seconds", 0.02)
    training = CostlyTraining(real=True, max_overhead="2 %")
    for _ in training.each_step():
        if training.controller.stretch >= 8:
            break
    training.monitor.detach()

    assert training.controller.stretch >= 8
    assert all(event["share"] > 0.02 for event in training.changes())


def test_configured_interval_returns_when_overhead_is_low(monkeypatch):
    monkeypatch.setattr(Costly, "seconds", 30.0)
    training = CostlyTraining()
    for _ in training.each_step():
        if training.controller.stretch >= 4 and Costly.seconds:
            monkeypatch.setattr(Costly, "seconds", 0.0)
        if training.controller.stretch == 1 and not Costly.seconds:
            break
    training.monitor.detach()
    events = training.changes()
    tightened = [event for event in events if event["now"] < event["was"]]

    assert 1 == events[-1]["now"]
    assert all(event["was"] == 2 * event["now"] for event in tightened)
    assert {"info"} == {event["severity"] for event in tightened}
    assert all(later["step"] - earlier["step"] >= PATIENCE for earlier, later in itertools.pairwise(tightened))


def test_switch_resets_the_stretch(monkeypatch):
    monkeypatch.setattr(Costly, "seconds", 30.0)
    training = CostlyTraining()
    at = 0
    for step in training.each_step():
        if not at and training.controller.stretch >= 4:
            monkeypatch.setattr(Costly, "seconds", 0.0)
            training.monitor.switch({"every": 3})
            at = step
        if at and step >= at + 10:
            break
    training.monitor.detach()

    assert 1 == training.controller.stretch
    assert [at + 1, at + 4, at + 7, at + 10] == [step for step in training.measured() if step > at][:4]


def test_every_times_and_start_step_keep_their_meaning_when_stretched():
    """Every second one of the steps 5, 8, 11, … is sampled."""
    training = CostlyTraining(options={"test_costly": {"start_step": 5, "every": 3, "times": 4}})
    for step in training.each_step(40):
        if step == 1:
            training.controller.sources.request_reaction(
                {"stretch": 2, "share": 0.9, "max_overhead": 0.5, "rank": 0, "changes": 0}, "budget"
            )
    training.monitor.detach()

    assert [5, 11, 17, 23] == training.measured()


def test_without_max_overhead_sampling_is_never_stretched(monkeypatch):
    monkeypatch.setattr(Costly, "seconds", 30.0)
    training = CostlyTraining(max_overhead=None)
    assert 40 == sum(1 for _ in training.each_step(40))
    training.monitor.detach()

    assert (list(range(1, 41)), []) == (training.measured(), training.changes())
