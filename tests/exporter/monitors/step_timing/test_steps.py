"""Phases of real training loops, compared with the sleeps that the loops measure themselves, also on two DDP ranks."""

import dataclasses
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from tests.exporter.parts import session_of
from tests.programs import run_two_ranks
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig

Rows = dict[int | None, dict[str, float]]


def phase_rows(records: Iterable[dict[str, Any]], name: str = "step_phase_seconds") -> Rows:
    found: Rows = defaultdict(dict)
    for record in records:
        for scalar in record["scalars"] or ():
            if scalar["name"] == name:
                found[record["step"]][json.loads(scalar["labels"])["phase"]] = scalar["value"]
    return dict(found)


def totals(records: Iterable[dict[str, Any]]) -> dict[str, float]:
    latest: dict[str, float] = {}
    for phases in phase_rows(records, "phase_seconds").values():
        latest.update(phases)
    return latest


EXACT = 1e-6


class Stopwatch:
    def __init__(self) -> None:
        self.each: dict[str, list[float]] = defaultdict(list)

    @property
    def slept(self) -> dict[str, float]:
        return {what: sum(times) for what, times in self.each.items()}

    def sleep(self, what: str, seconds: float) -> None:
        began = time.monotonic()
        time.sleep(seconds)
        self.each[what].append(time.monotonic() - began)


class SlowNet(nn.Module):
    def __init__(self, watch: Stopwatch) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.watch = watch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.watch.sleep("forward" if self.training else "evaluation", 0.02)
        return SlowBackward.apply(self.linear(x), self.watch)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, watch: Stopwatch) -> torch.Tensor:
        ctx.watch = watch
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.watch.sleep("backward", 0.01)
        return gradients[0], None


class SlowSGD(torch.optim.SGD):
    watch: Stopwatch

    def step(self, closure: Any = None) -> Any:
        self.watch.sleep("optimizer", 0.02)
        return super().step(closure)


class Training:
    """A training whose parts sleep, with a monitor, and the records of its last step and the steps before it."""

    def __init__(self, quiet: MonitorConfig, reader: Any, eventually: Any) -> None:
        self.watch = Stopwatch()
        self.net = SlowNet(self.watch)
        self.optimizer = SlowSGD(self.net.parameters(), lr=0.1)
        self.optimizer.watch = self.watch
        self._quiet, self._reader, self._eventually = quiet, reader, eventually

    def steps(self, count: int, per_step: int = 1) -> Iterator[int]:
        """Train, and yield after each update, where the script may do other work."""
        for number in range(1, count * per_step + 1):
            self.watch.sleep("data_wait", 0.03)
            self.net(torch.ones(1, 4)).sum().backward()
            if number % per_step == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
                if number == per_step:
                    self.watch.each.clear()  # of the steps after the first; its data wait is the first step's
                yield number // per_step

    def run(self, loop: Callable[[Monitor], object], last: int = 3, **settings: Any) -> list[dict[str, Any]]:
        """Return the records after `loop`, when the phases of the step `last` are published."""
        config = dataclasses.replace(self._quiet, **settings)
        with Monitor(config).attach(self.net, self.optimizer) as monitor:
            loop(monitor)
            monitor.end_step()
            self.read = self._reader(monitor)
            shown = phase_rows if config.phases else lambda records: {last: 1} if totals(records) else {}
            records: list[dict[str, Any]] = self._eventually(
                lambda: (found := self.read.records()) and last in shown(found) and found
            )
            assert 0 == monitor.faults
        return records


@pytest.fixture
def training(quiet: MonitorConfig, reader: Any, eventually: Any) -> Training:
    torch.manual_seed(0)
    return Training(quiet, reader, eventually)


@pytest.fixture
def all_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope_exporter.monitors.step_timing.EVERY_SECONDS", 0.0)


def step_phases(records: list[dict[str, Any]]) -> dict[str, float]:
    summed: dict[str, float] = defaultdict(float)
    for step, phases in phase_rows(records).items():
        for phase, seconds in phases.items():
            summed[phase] += seconds if step not in (None, 1) else 0.0
    return summed


def scalars(records: list[dict[str, Any]], name: str) -> dict[int, float]:
    found = ((record["step"], scalar) for record in records for scalar in record["scalars"] or ())
    return {step: scalar["value"] for step, scalar in found if scalar["name"] == name}


@pytest.mark.parametrize("every", [1, 100])
def test_phases_contain_their_sleeps_and_sum_up_to_the_step(every, training, all_totals):
    began = time.monotonic()
    records = training.run(lambda _: [*training.steps(3, per_step=2)], every=every)
    took = time.monotonic() - began
    seconds = scalars(records, "step_seconds")
    found, phases, gone, slept = step_phases(records), phase_rows(records), totals(records), training.watch.slept

    # The script ends the last step, so no data wait follows it.
    unseen = sum(training.watch.each["data_wait"][-2:])
    assert all(found[phase] >= time - unseen * (phase == "data_wait") for phase, time in slept.items())
    assert {"data_wait", "forward", "backward", "optimizer"} == set(slept)
    assert all(abs(seconds[step] - sum(phases[step].values())) < EXACT for step in (2, 3))
    assert {"first_step", "monitor"} == set(phases[1])
    assert phases[1]["first_step"] > seconds[1] - phases[1]["monitor"] - EXACT  # and the time before it
    assert sum(slept.values()) - unseen < sum(gone.values()) < took
    assert {"first_step", "data_wait", "forward", "backward", "optimizer", "other", "monitor"} == set(gone)


def test_evaluation_and_checkpoint_are_not_data_wait(training, all_totals):
    net, sleep, batch = training.net, training.watch.sleep, torch.ones(1, 4)

    def loop(monitor: Monitor) -> None:
        for step in training.steps(4):
            if step == 3:
                net.eval()
                with torch.no_grad():
                    net(batch)
                    sleep("evaluation", 0.02)
                    net(batch)
                net.train()
            if step == 2:
                with monitor.phase("evaluation"):
                    net.eval()
                    net(batch)
                    net.train()
                    with monitor.phase("checkpoint"):
                        sleep("checkpoint", 0.06)

    records = training.run(loop, last=4)
    found, gone, slept = step_phases(records), totals(records), training.watch.slept

    assert 0.06 <= slept["checkpoint"] <= found["checkpoint"]
    assert 0.08 <= slept["evaluation"] <= found["evaluation"]
    assert found["evaluation"] + found["data_wait"] + found["checkpoint"] <= sum(found.values()) - slept["forward"]
    assert found["checkpoint"] == pytest.approx(gone["checkpoint"], abs=0.02)  # by the clock of the training thread
    assert found["evaluation"] == pytest.approx(gone["evaluation"], abs=0.02)


def test_script_may_announce_an_inferred_phase(training):
    """A loop with long logging after the update: the announced data wait has the announced phase."""

    def loop(monitor: Monitor) -> None:
        for _ in range(3):
            with monitor.phase("data_wait"):
                time.sleep(0.02)
            training.net(torch.ones(1, 4)).sum().backward()
            with monitor.phase("collective"):
                time.sleep(0.03)
            training.optimizer.step()
            with monitor.phase("logging"):
                time.sleep(0.04)

    records = training.run(loop)
    second = phase_rows(records)[2]

    assert (0.02, 0.03, 0.04) <= (second["data_wait"], second["collective"], second["logging"])
    assert {"logging"} == {event["message"] for record in records for event in record["events"] or ()}
    assert 0.03 <= scalars(records, "pre_collective_seconds")[2]  # computing, without a data wait before it


def test_no_marks_are_kept_without_step_timing(training):
    def loop(monitor: Monitor) -> None:
        for _ in training.steps(2):
            with monitor.phase("checkpoint"):
                pass

    records = training.run(loop, phases=False)

    assert {} == phase_rows(records)
    assert {"checkpoint"} == set(totals(records))


def test_phase_on_another_thread_is_ignored(training):
    over = threading.Event()

    def loop(monitor: Monitor) -> None:
        def write() -> None:
            with monitor.phase("checkpoint"):
                over.wait(60)

        thread = threading.Thread(target=write)
        for step in training.steps(3):
            if step == 1:
                thread.start()
        over.set()
        thread.join()

    assert not any("checkpoint" in phases for phases in phase_rows(training.run(loop)).values())


def test_training_in_eval_mode_is_not_an_evaluation(training):
    training.net.eval()
    found = step_phases(training.run(lambda _: [*training.steps(4)], last=4))

    assert "evaluation" not in found
    assert found["forward"] >= 0.04


def test_step_is_published_during_a_later_evaluation(monkeypatch, training, eventually):
    """Each batch is a phase of milliseconds; the step must not wait for the last one, nor have a row for each."""
    monkeypatch.setattr("rankscope_exporter.publish.publisher.IDLE_FLUSH_SECONDS", 0.5)
    monkeypatch.setattr("rankscope_exporter.training.recorder.LOGGING_SECONDS", 0.5)

    def loop(monitor: Monitor) -> None:
        ring = session_of(monitor).channel.ring
        next(training.steps(1))

        def rows_of_the_step() -> list[str]:
            for _ in range(5):
                with monitor.phase("evaluation"):
                    time.sleep(0.001)
                monitor.log(accuracy=0.5)
            records = [record for record in ring.after(-1, 1 << 30).records if record.step == 1 and record.statistics]
            return [one.labels["phase"] for record in records for one in record.scalars if one.name == "phase_seconds"]

        assert ["evaluation"] == eventually(rows_of_the_step)

    training.run(loop, last=1)


PROGRAM = """
import time
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from rankscope_exporter import Monitor, MonitorConfig

STEPS, SLEEP = 6, 0.15

class Net(nn.Module):
    def __init__(self, is_slow):
        super().__init__()
        self.linear, self.is_slow, self.slept = nn.Linear(64, 64), is_slow, 0.0

    def forward(self, x):
        if self.is_slow:
            began = time.monotonic()
            time.sleep(SLEEP)
            self.slept += time.monotonic() - began
        return self.linear(x)

def main():
    net = Net(is_slow=rank == 1)
    ddp = DistributedDataParallel(net, **OPTIONS)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    published = []
    with Monitor(MonitorConfig(console=False, exit_wait_seconds=0, every=100)).attach(ddp, optimizer) as monitor:
        monitor._session.publisher.publish = published.append
        for step in range(STEPS):
            for micro in range(MICRO):
                ddp.require_backward_grad_sync = micro == MICRO - 1
                ddp(torch.ones(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                net.slept = 0.0
        monitor.end_step()
        faults = monitor.faults
    seconds_of = {"slept": net.slept, "faults": faults}
    for scalar in [scalar for record in published for scalar in record.scalars if (record.step or 0) > 1]:
        if scalar.name in ("step_phase_seconds", "pre_collective_seconds", "step_seconds"):
            key = scalar.labels.get("phase", scalar.name)
            seconds_of[key] = seconds_of.get(key, 0.0) + scalar.value
    return seconds_of
"""


@pytest.mark.usual(1)
@pytest.mark.parametrize(
    ("options", "micro"), [({}, 1), ({"gradient_as_bucket_view": True}, 2)], ids=["plain", "bucket views, accumulated"]
)
def test_slow_rank_computes_longer_and_the_other_waits(options, micro):
    fast, slow = run_two_ranks(PROGRAM.replace("OPTIONS", repr(options)).replace("MICRO", str(micro)))

    assert 0 == fast["faults"] == slow["faults"]
    assert slow["slept"] <= slow["pre_collective_seconds"]
    assert slow["slept"] <= slow["forward"]
    # The other rank waits for the sleep, except for its own computing and the load of the machine.
    assert slow["slept"] / 2 <= fast["collective"]
    assert fast["pre_collective_seconds"] < slow["pre_collective_seconds"]
    assert slow["collective"] < fast["collective"]
    for rank in (fast, slow):
        phases = ("forward", "backward", "collective", "optimizer", "data_wait", "other", "monitor")
        assert rank["step_seconds"] == pytest.approx(sum(rank.get(phase, 0.0) for phase in phases), abs=1e-6)
