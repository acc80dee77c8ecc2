"""Phases of real training loops, compared with the sleeps that the loops measure themselves."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.exporter.observers.step_timing.phase_rows import phase_rows, totals
from tests.exporter.parts import session_of
from torch import nn
from torch.utils.data import DataLoader, Dataset

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.observers.step_timing.clock import HostClock
from rankscope_exporter.observers.step_timing.observer import MOST_MARKS, LoopTraits, StepTimingObserver
from rankscope_exporter.records.pending_step import PendingStep

EXACT = 1e-6


class Stopwatch:
    """Sleeps, and measures the duration of the sleeps."""

    def __init__(self) -> None:
        self.each: dict[str, list[float]] = defaultdict(list)

    @property
    def slept(self) -> dict[str, float]:
        return {what: sum(times) for what, times in self.each.items()}

    def sleep(self, what: str, seconds: float) -> None:
        began = time.monotonic()
        time.sleep(seconds)
        self.each[what].append(time.monotonic() - began)


class SlowData(Dataset):
    def __init__(self, watch: Stopwatch, batches: int) -> None:
        self._watch = watch
        self._batches = batches

    def __len__(self) -> int:
        return self._batches

    def __getitem__(self, index: int) -> torch.Tensor:
        self._watch.sleep("data_wait", 0.05)
        return torch.ones(4)


class SlowNet(nn.Module):
    def __init__(self, watch: Stopwatch) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.watch = watch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.watch.sleep("forward" if self.training else "evaluation", 0.03)
        return SlowBackward.apply(self.linear(x), self.watch)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, watch: Stopwatch) -> torch.Tensor:
        ctx.watch = watch
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.watch.sleep("backward", 0.02)
        return gradients[0], None


class SlowSGD(torch.optim.SGD):
    watch: Stopwatch

    def step(self, closure: Any = None) -> Any:
        self.watch.sleep("optimizer", 0.04)
        return super().step(closure)


@pytest.fixture
def watch() -> Stopwatch:
    return Stopwatch()


def slow_training(watch: Stopwatch) -> tuple[SlowNet, SlowSGD]:
    torch.manual_seed(0)
    net = SlowNet(watch)
    optimizer = SlowSGD(net.parameters(), lr=0.1)
    optimizer.watch = watch
    return net, optimizer


def train(net: SlowNet, optimizer: SlowSGD, monitor: Monitor | None, batches: int, per_step: int = 1) -> Iterator[int]:
    """Train, and yield after each update, where the script may do other work."""
    for number, batch in enumerate(DataLoader(SlowData(net.watch, batches)), start=1):
        net(batch).sum().backward()
        if number % per_step == 0:
            optimizer.step()
            optimizer.zero_grad()
            yield number // per_step


def run(config: MonitorConfig, watch: Stopwatch, between: Callable[[Monitor, SlowNet, int], None], reader: Any,
        eventually: Any, *, per_step: int = 1) -> list[dict[str, Any]]:  # fmt: skip
    net, optimizer = slow_training(watch)
    with Monitor(config).attach(net, optimizer) as monitor:
        for step in train(net, optimizer, monitor, 4 * per_step, per_step):
            if step == 1:
                net.watch.each.clear()  # of the steps after the first; its data wait is the first step's
            between(monitor, net, step)
        monitor.end_step()
        read = reader(monitor)
        records = eventually(lambda: (found := read.records()) and 4 in phase_rows(found) and found)
        assert 0 == monitor.faults
    return records


def step_phases(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the phases of steps 2 to 4."""
    summed: dict[str, float] = defaultdict(float)
    for step, phases in phase_rows(records).items():
        for phase, seconds in phases.items():
            summed[phase] += seconds if step in (2, 3, 4) else 0.0
    return summed


@pytest.mark.parametrize("every", [1, 100])
def test_phases_contain_their_sleeps_and_sum_up_to_the_step(every, quiet, watch, reader, eventually):
    config = dataclasses.replace(quiet, every=every)
    records = run(config, watch, lambda *_: None, reader, eventually, per_step=2)
    seconds = {
        record["step"]: scalar["value"]
        for record in records
        for scalar in record["scalars"] or ()
        if scalar["name"] == "step_seconds"
    }
    found, phases = step_phases(records), phase_rows(records)

    # The script ends the last step, so no data wait follows it.
    unseen = {"data_wait": sum(watch.each["data_wait"][-2:])}
    assert all(found[phase] >= slept - unseen.get(phase, 0) for phase, slept in watch.slept.items())
    assert {"data_wait", "forward", "backward", "optimizer"} == set(watch.slept)
    assert all(abs(seconds[step] - sum(phases[step].values())) < EXACT for step in (2, 3, 4))
    assert {"first_step", "monitor"} == set(phases[1])
    assert phases[1]["first_step"] > seconds[1] - phases[1]["monitor"] - EXACT  # and the time before it


def test_evaluation_and_checkpoint_are_not_data_wait(quiet, watch, reader, eventually, monkeypatch):
    monkeypatch.setattr("rankscope_exporter.observers.step_timing.observer.EVERY_SECONDS", 0.0)

    def between(monitor: Monitor, net: SlowNet, step: int) -> None:
        if step == 3:
            net.eval()
            with torch.no_grad():
                net(torch.ones(1, 4))
                watch.sleep("evaluation", 0.02)
                net(torch.ones(1, 4))
            net.train()
        if step == 2:
            with monitor.phase("evaluation"):
                net.eval()
                net(torch.ones(1, 4))
                net.train()
                with monitor.phase("checkpoint"):
                    watch.sleep("checkpoint", 0.06)

    records = run(quiet, watch, between, reader, eventually)
    found = step_phases(records)
    gone = totals(records)

    assert 0.06 <= watch.slept["checkpoint"] <= found["checkpoint"]
    assert 0.11 <= watch.slept["evaluation"] <= found["evaluation"]
    assert (
        found["evaluation"] + found["data_wait"] + found["checkpoint"] <= sum(found.values()) - watch.slept["forward"]
    )
    assert found["checkpoint"] == pytest.approx(gone["checkpoint"], abs=0.02)  # by the clock of the training thread
    assert found["evaluation"] == pytest.approx(gone["evaluation"], abs=0.02)


def test_totals_sum_up_to_the_time_since_attach(quiet, watch, reader, eventually, monkeypatch):
    monkeypatch.setattr("rankscope_exporter.observers.step_timing.observer.EVERY_SECONDS", 0.0)
    began = time.monotonic()
    records = run(quiet, watch, lambda *_: None, reader, eventually)
    took = time.monotonic() - began
    gone = totals(records)

    assert sum(watch.slept.values()) - 0.05 < sum(gone.values()) < took
    assert {"first_step", "data_wait", "forward", "backward", "optimizer", "other", "monitor"} == set(gone)


def pre_collective(records: list[dict[str, Any]]) -> dict[int, float]:
    return {
        record["step"]: scalar["value"]
        for record in records
        for scalar in record["scalars"] or ()
        if scalar["name"] == "pre_collective_seconds"
    }


def test_script_may_announce_an_inferred_phase(quiet, watch, reader, eventually):
    """A loop with long logging after the update: the announced data wait has the announced phase."""
    net, optimizer = slow_training(watch)
    with Monitor(quiet).attach(net, optimizer) as monitor:
        for _ in range(3):
            with monitor.phase("data_wait"):
                time.sleep(0.02)
            net(torch.ones(1, 4)).sum().backward()
            with monitor.phase("collective"):
                time.sleep(0.03)
            optimizer.step()
            with monitor.phase("logging"):
                time.sleep(0.04)
        monitor.end_step()
        read = reader(monitor)
        records = eventually(lambda: (found := read.records()) and 3 in phase_rows(found) and found)
        names = {event["message"] for event in read.events() if event["type"] == "phase"}
        assert 0 == monitor.faults
    second = phase_rows(records)[2]

    assert (0.02, 0.03, 0.04) <= (second["data_wait"], second["collective"], second["logging"])
    assert {"logging"} == names
    assert 0.03 <= pre_collective(records)[2]  # computing, without a data wait before it


def test_no_marks_are_kept_without_step_timing(quiet, watch, reader, eventually):
    net, optimizer = slow_training(watch)
    with Monitor(dataclasses.replace(quiet, phases=False)).attach(net, optimizer) as monitor:
        for _ in train(net, optimizer, monitor, 2):
            with monitor.phase("checkpoint"):
                pass
        monitor.end_step()
        read = reader(monitor)
        records = eventually(lambda: (found := read.records()) and len(totals(found)) and found)

    assert {} == phase_rows(records)
    assert {"checkpoint"} == set(totals(records))


def test_training_is_bit_identical_with_step_timing(quiet):
    """The model has dropout, so a used random number would change the parameters."""

    def trained(**settings: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        with Monitor(dataclasses.replace(quiet, **settings)).attach(net, optimizer) as monitor:
            for _ in range(5):
                net(torch.ones(4, 8)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert 0 == monitor.faults
        return [parameter.detach() for parameter in net.parameters()], torch.get_rng_state()

    (bare, seed), (timed, timed_seed) = trained(enabled=False), trained(every=100)

    assert all(torch.equal(one, other) for one, other in zip(bare, timed, strict=True))
    assert torch.equal(seed, timed_seed)


def test_step_with_a_late_end_is_timed(quiet, watch, reader, eventually, monkeypatch):
    """The record of a step does not wait for a long evaluation after it; its phases follow in a later record."""
    monkeypatch.setattr("rankscope_exporter.publishing.publisher.IDLE_FLUSH_SECONDS", 0.1)
    net, optimizer = slow_training(watch)
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        for step in train(net, optimizer, monitor, 3):
            if step == 2:
                eventually(lambda: 2 in {record["step"] for record in read.records()})
                assert 2 not in phase_rows(read.records())
                with monitor.phase("evaluation"):
                    watch.sleep("evaluation", 0.05)
        records = eventually(lambda: (found := read.records()) and 2 in phase_rows(found) and found)

    assert watch.slept["evaluation"] <= phase_rows(records)[2]["evaluation"]


def test_marks_of_a_long_step_are_limited_without_losing_time():
    handed: list[PendingStep] = []
    phases = StepTimingObserver(HostClock(), LoopTraits(), handed.append)
    for step in (1, 2):
        phases.on_step_begin(step)
        began = time.monotonic()
        for _ in range(30_000 if step == 2 else 1):
            phases.on_forward_begin()
            phases.on_forward_end()
        kept = len(phases._marks)
        pending_step = PendingStep(step, 0, ended_at=time.monotonic())
        phases.on_step_timed(pending_step, "forward")
    ((read,),) = (pending_step.later,)
    shown = {scalar.labels["phase"]: scalar.value for scalar in read() if scalar.name == "step_phase_seconds"}

    assert kept <= MOST_MARKS + 3
    assert shown["other"] > shown["forward"] > 0
    assert sum(shown.values()) >= pending_step.ended_at - began


def test_phase_on_another_thread_is_ignored(quiet, watch, reader, eventually):
    net, optimizer = slow_training(watch)
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        writer = threading.Event()
        for step in train(net, optimizer, monitor, 3):
            if step == 1:

                def write() -> None:
                    with monitor.phase("checkpoint"):
                        writer.wait(60)

                thread = threading.Thread(target=write)
                thread.start()
        writer.set()
        thread.join()
        monitor.end_step()
        records = eventually(lambda: (found := read.records()) and 3 in phase_rows(found) and found)
        assert 0 == monitor.faults

    assert not any("checkpoint" in phases for phases in phase_rows(records).values())


def test_training_in_eval_mode_is_not_an_evaluation(quiet, watch, reader, eventually):
    net, optimizer = slow_training(watch)
    net.eval()
    with Monitor(quiet).attach(net, optimizer) as monitor:
        for _ in train(net, optimizer, monitor, 4):
            pass
        monitor.end_step()
        read = reader(monitor)
        records = eventually(lambda: (found := read.records()) and 4 in phase_rows(found) and found)

    assert "evaluation" not in step_phases(records)
    assert step_phases(records)["forward"] >= 0.06


def test_step_is_published_during_a_later_evaluation(monkeypatch, quiet, eventually):
    """Each batch is a phase of milliseconds; the step must not wait for the last one, nor have a row for each."""
    monkeypatch.setattr("rankscope_exporter.publishing.publisher.IDLE_FLUSH_SECONDS", 0.2)
    monkeypatch.setattr("rankscope_exporter.training.recorder.LOGGING_SECONDS", 0.2)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    monitor = Monitor(quiet).attach(net, optimizer)
    ring = session_of(monitor).channel.ring
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()

    def rows_of_the_step() -> list[str]:
        for _ in range(5):
            with monitor.phase("evaluation"):
                time.sleep(0.001)
            monitor.log(accuracy=0.5)
        records = ring.after(-1, 1 << 30).records
        return next(
            (
                [s.labels["phase"] for s in r.scalars if s.name == "phase_seconds"]
                for r in records
                if r.step == 1 and r.statistics is not None
            ),
            [],
        )

    found = eventually(rows_of_the_step)
    monitor.detach()

    assert ["evaluation"] == found
