"""Independent parts of a monitor: a part that fails is logged once, and the other parts continue."""

from __future__ import annotations

import functools
import json
import logging
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.exporter.conftest import wait_until
from tests.programs import run_program
from torch import nn

from rankscope_contract.model.events import EventType
from rankscope_exporter import AnomalyNan, Monitor
from rankscope_exporter.adapters.parameter_hooks import remove_all
from rankscope_exporter.api.session import Session
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.monitors.flight_recorder.poller import FlightRecorderPoller
from rankscope_exporter.monitors.hangs.watchdog import Watchdog
from rankscope_exporter.monitors.hardware.poller import HardwarePoller
from rankscope_exporter.observers.throughput.meter import Throughput
from rankscope_exporter.publishing import publisher as publisher_module
from rankscope_exporter.publishing.console import Console
from rankscope_exporter.publishing.publisher import Publisher
from rankscope_exporter.quantities.gradients import Gradients, MicroGradients
from rankscope_exporter.reactions.anomaly_reactions import AnomalyReactions, CaptureController
from rankscope_exporter.reconfiguration.change_sources import ChangeSources
from rankscope_exporter.sampling.active_quantity import ActiveQuantity
from rankscope_exporter.serving.rank_server import RankServer
from rankscope_exporter.training.hooks import Hooks
from rankscope_exporter.training.recorder import Recorder

WHY = "no such device"


class Training:
    """A small training with a monitor, and its records."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        config = {"console": False, "exit_wait_seconds": 0, "quantities": ["parameters", "gradients"], **settings}
        self.monitor = Monitor(config).attach(self.net, self.optimizer)
        self.session: Session = self.monitor._session  # type: ignore[assignment]  # one that fails has none

    def train(self, steps: int = 3, **values: Any) -> None:
        for _ in range(steps):
            self.net(torch.ones(2, 3)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.monitor.log(**(values or {"loss": 1.0}))

    def finish(self) -> None:
        session = self.session
        self.monitor.detach()
        self.records = session.channel.ring.after(-1, 1 << 30).records

    def kinds(self) -> set[str]:
        """Return the kinds that have rows."""
        found = set()
        for record in self.records:
            if record.statistics is not None:
                entries = record.statistics.plan.plan.entries
                sizes = record.statistics.counts[-len(entries) :]
                found |= {e.kind for e, n in zip(entries, sizes, strict=True) if n.is_valid}
        return found

    def scalars(self, name: str) -> list[float]:
        return [item.value for record in self.records for item in record.scalars if item.name == name]

    def types(self) -> set[str]:
        return {event.type for record in self.records for event in record.events}


def broken(*_: Any, **__: Any) -> Any:
    raise OSError(WHY)


def hooks_of(training: Training) -> int:
    modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in training.net.modules())
    tensors = sum(len(p._post_accumulate_grad_hooks or ()) for p in training.net.parameters())
    optimizer = training.optimizer
    return modules + tensors + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def named(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the places of all faults that were logged."""
    return [record.getMessage().partition(" failed")[0] for record in caplog.records if WHY in record.getMessage()]


# The beginning.

OPTIONAL = {
    "watchdog": (Watchdog, "start"),
    "throughput": (Throughput, "install"),
    "hardware": (HardwarePoller, "start"),
    "remarks": (Session, "_publish_notices"),
    "switching": (ChangeSources, "start"),
}


@pytest.mark.parametrize("part", OPTIONAL)
def test_failed_start_of_an_optional_part_keeps_the_others(part, monkeypatch, caplog):
    started = []
    for name, (owner, method) in OPTIONAL.items():
        original = getattr(owner, method)
        replacement = broken if name == part else _noting(started, name, original)
        monkeypatch.setattr(owner, method, replacement)
    training = Training()
    training.train()
    training.finish()

    assert set(OPTIONAL) - {part} == set(started)
    assert {"param_after", "grad_reduced"} <= training.kinds()
    assert 1 == len(named(caplog))


def _noting(started: list[str], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        started.append(name)
        return original(*args, **named)

    return call


def test_failed_attach_stops_all_started_parts(monkeypatch, caplog):
    undone = []
    monkeypatch.setattr(Hooks, "install", broken)
    monkeypatch.setattr(Hooks, "remove", _noting(undone, "hooks", broken))
    monkeypatch.setattr(Publisher, "stop", _noting(undone, "publisher", broken))
    monkeypatch.setattr(RankServer, "close", _noting(undone, "channel", RankServer.close))
    training = Training()

    assert ["hooks", "publisher", "channel"] == undone
    assert None is training.monitor.address
    assert ["undoing attach()", "attach()"] == named(caplog)


def test_invalid_process_groups_do_not_stop_measuring(monkeypatch, caplog):
    monkeypatch.setattr("rankscope_exporter.api.session_factory.find_replica_dedup", broken)
    training = Training()
    training.train()
    training.finish()

    assert {"param_after", "grad_reduced"} <= training.kinds()
    assert ["reading dp_group and tp_group"] == named(caplog)


# The end.

ENDING = {
    "hooks": (Hooks, "remove"),
    "watchdog": (Watchdog, "stop"),
    "hardware": (HardwarePoller, "stop"),
    "last step": (Recorder, "finish"),
    "captures": (CaptureController, "finish"),
    "collectives": (FlightRecorderPoller, "stop"),
    "publisher": (Publisher, "stop"),
    "on_anomaly": (AnomalyReactions, "stop"),
    "switching": (ChangeSources, "stop"),
}


@pytest.mark.parametrize("part", ENDING)
def test_failed_stop_of_a_part_keeps_the_exit_record(part, monkeypatch, caplog):
    """The other parts are stopped, and the port is closed."""
    ended: list[str] = []
    skipped: list[Callable[[], object]] = []

    def failing(original: Callable[..., object]) -> Callable[..., object]:
        def fail(*args: Any, **named: Any) -> object:
            skipped.append(functools.partial(original, *args, **named))
            return broken()

        return fail

    training = Training(capture={})
    for name, (owner, method) in ENDING.items():
        original = getattr(owner, method)
        monkeypatch.setattr(owner, method, _noting(ended, name, failing(original) if name == part else original))
    training.train()
    address = training.monitor.address
    training.finish()
    wait_until(lambda: EventType.EXIT in _types(training.session))
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{address}/healthz", timeout=5)

    monkeypatch.undo()
    for end in skipped:  # a remaining thread or hook would affect later tests
        end()

    assert set(ENDING) == set(ended)
    assert 1 == len(named(caplog))


def _types(session: Session) -> set[str]:
    return {event.type for record in session.channel.ring.after(-1, 1 << 30).records for event in record.events}


class Handle:
    def __init__(self, removed: list[str], name: str, *, fails: bool = False) -> None:
        self._removed, self._name, self._fails = removed, name, fails

    def remove(self) -> None:
        self._removed.append(self._name)
        if self._fails:
            raise OSError(WHY)


def test_failed_removal_of_a_hook_removes_the_others(caplog):
    training = Training()
    training.train()
    removed: list[str] = []
    training.session.hooks._handles.insert(0, Handle(removed, "first", fails=True))
    training.session.hooks.keep(Handle(removed, "last"))
    training.finish()

    assert (["first", "last"], 0) == (removed, hooks_of(training))
    assert ["removing a hook"] == named(caplog)


def test_failed_removal_in_a_quantity_removes_hooks_of_the_others(monkeypatch, caplog):
    training = Training(quantities=["activations", "structure", "gradients"])
    training.train()
    monkeypatch.setattr(ActiveQuantity, "unhook", _breaking("activations", ActiveQuantity.unhook))
    before = hooks_of(training)
    training.finish()

    assert 0 < hooks_of(training) < before  # hooks of activations
    assert ["hooks of activations"] == named(caplog)


def _breaking(name: str, original: Callable[[ActiveQuantity], None]) -> Callable[[ActiveQuantity], None]:
    def unhook(member: ActiveQuantity) -> None:
        if member.quantity.name == name:
            raise OSError(WHY)
        original(member)

    return unhook


def test_handles_are_removed_in_order_before_an_error_is_raised():
    removed: list[str] = []
    handles = [Handle(removed, "one"), Handle(removed, "two", fails=True), Handle(removed, "three")]
    with pytest.raises(OSError, match=WHY):
        remove_all(handles)

    assert ["one", "two", "three"] == removed


OF_PROCESS = """
import os
from rankscope_exporter.process import lifecycle

class Part:
    def __init__(self, name):
        self.name = name
    def write(self, call):
        print(call, self.name, flush=True)
        if self.name == "broken":
            raise OSError("no such device")
    def abandon_after_fork(self):
        self.write("abandoned")
    def end_of_process(self, reason, error):
        self.write("ended")

for name in ("one", "broken", "two", "three"):
    lifecycle.watch(Part(name))
if os.fork() == 0:
    os._exit(0)
os.wait()
"""


def test_failed_monitor_at_fork_or_exit_keeps_the_others():
    done = run_program(OF_PROCESS)

    assert 0 == done.returncode, done.stderr
    names = ("broken", "one", "three", "two")
    assert sorted(f"{what} {name}" for what in ("abandoned", "ended") for name in names) == sorted(
        done.stdout.splitlines()
    )


OF_SIGNAL = """
import os, signal, time
from rankscope_exporter.process import stop_signals

class Part:
    def __init__(self, name):
        self.name = name
    def last_records(self, name):
        if self.name == "broken":
            raise OSError("no such device")
        return self.wait
    def wait(self):
        print("heard", self.name, flush=True)
        if self.name == "waiting":
            raise OSError("no such device")

for name in ("one", "broken", "waiting", "two"):
    stop_signals.install(Part(name), ["SIGTERM"])
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_failed_monitor_at_a_stop_signal_keeps_the_others():
    done = run_program(OF_SIGNAL)

    assert -15 == done.returncode, done.stderr
    assert ["heard one", "heard two", "heard waiting"] == sorted(done.stdout.splitlines())
    assert 2 == done.stderr.count("OSError: no such device")


# A step.


def test_logged_value_that_is_not_a_number_keeps_the_others(caplog):
    training = Training()
    training.train(2, loss=1.5, note="a text", tokens=4)
    training.finish()

    assert ([1.5, 1.5], [4.0, 4.0]) == (training.scalars("loss"), training.scalars("tokens"))
    assert 2 == training.monitor.faults
    assert 1 == len([record for record in caplog.records if "log(note=…) failed" in record.getMessage()])


def test_unreadable_learning_rate_keeps_the_other_values():
    training = Training()
    training.optimizer.param_groups[0]["lr"] = {"of": "nothing"}
    training.optimizer.step = lambda *_: None  # type: ignore[method-assign]
    training.session.recorder.forward_begins()
    training.session.recorder.update_begins(training.optimizer)
    training.session.recorder.end_step(skipped=False)
    training.finish()

    assert "param_before" in training.kinds()
    assert 1 == training.monitor.faults


def test_unreadable_statistics_keep_numbers_and_events_of_the_step(monkeypatch, caplog):
    monkeypatch.setattr(publisher_module, "finish", broken)
    training = Training(rules=[AnomalyNan()])
    training.train(1)
    training.train(1, loss=float("nan"))
    training.finish()

    assert [1.0] == training.scalars("loss")[:1]
    assert {EventType.ANOMALY, EventType.FAULT} <= training.types()
    assert ["computing the statistics of a step"] == named(caplog)


def test_fault_in_the_last_record_is_published(monkeypatch):
    """Its event is queued behind the request to end."""
    is_ending = threading.Event()

    def fail_late(*_: Any) -> None:
        is_ending.wait(10)
        raise OSError(WHY)

    monkeypatch.setattr(publisher_module, "finish", fail_late)
    stop = Publisher.stop

    def request_end(publisher: Publisher, seconds: float) -> bool:
        publisher._steps.items.put(None)
        is_ending.set()
        return stop(publisher, seconds)

    monkeypatch.setattr(Publisher, "stop", request_end)
    training = Training()
    training.train(1)
    training.finish()

    assert {EventType.FAULT, EventType.EXIT} <= training.types()


def test_failed_copy_of_statistics_keeps_the_numbers_of_the_step(monkeypatch, caplog):
    monkeypatch.setattr("rankscope_exporter.sampling.active_quantities.HostCopy", broken)
    training = Training()
    training.train(2)
    training.finish()

    assert [1.0, 1.0] == training.scalars("loss")
    assert ["copying statistics"] == named(caplog)


def test_quantity_that_fails_at_a_gradient_keeps_the_others(monkeypatch, caplog):
    monkeypatch.setattr(Gradients, "on_gradient_ready", broken)
    heard: list[str] = []
    monkeypatch.setattr(MicroGradients, "on_gradient_ready", lambda *_: heard.append("micro"), raising=False)
    training = Training(quantities=["gradients", "micro_gradients"])
    training.train(1)
    training.finish()

    assert 4 == len(heard)
    assert ["gradients (on_gradient_ready)"] == named(caplog)


def test_record_refused_by_the_server_reaches_sinks_and_callbacks(monkeypatch, caplog):
    told: list[int | None] = []
    training = Training(rules=[AnomalyNan()], sinks={"api": {}})
    monkeypatch.setattr(training.session.channel, "publish", broken)
    monkeypatch.setattr(training.session.reactions.captures, "fired", lambda step, _events: told.append(step))
    training.train(1, loss=float("nan"))
    training.monitor.detach()

    assert [1] == [step for step in told if step is not None]
    assert (1,) == training.monitor.sink("api").steps()
    assert ["publishing a record"] == named(caplog)


def test_failed_console_keeps_captures_and_callbacks(monkeypatch):
    told: list[int | None] = []
    training = Training(rules=[AnomalyNan()])
    monkeypatch.setattr(Console, "line", broken)
    monkeypatch.setattr(training.session.reactions.captures, "fired", lambda step, _events: told.append(step))
    training.train(1, loss=float("nan"))
    training.finish()

    assert [1] == told


# The page.


@pytest.mark.parametrize("part", ["_overhead", "_dropped", "collectives", "stretch"])
def test_failed_part_of_the_page_keeps_the_others(part, monkeypatch, caplog):
    training = Training()
    training.train()
    channel = training.session.channel
    if part.startswith("_"):
        monkeypatch.setattr(channel, part, broken)
    else:
        monkeypatch.setattr(channel, "_sources", replace(channel._sources, **{part: broken}))
    page = urllib.request.urlopen(f"{training.monitor.address}/metrics", timeout=30).read().decode()
    training.finish()

    assert "rankscope_run_info{" in page
    assert "rankscope_ring_records{" in page
    assert 1 == len(named(caplog))


@pytest.mark.parametrize("part", ["persistence", "_server", "_registration"])
def test_failed_close_of_a_server_part_closes_the_others(part, monkeypatch):
    training = Training(serve={"ingest_url": "http://127.0.0.1:9"})
    channel = training.session.channel
    closed: list[str] = []
    for name, method in (("persistence", "close"), ("_server", "stop"), ("_registration", "stop")):
        owner = getattr(channel, name)
        original = getattr(owner, method)
        monkeypatch.setattr(owner, method, _noting(closed, name, broken if name == part else original))
    training.finish()

    assert ["_registration", "_server", "persistence"] == closed
    if part == "_server":
        monkeypatch.undo()
        channel._server.stop()


# Switching.


def test_fault_in_the_agreement_keeps_the_switch_thread_running(monkeypatch, tmp_path):
    """An unavailable store raises RuntimeError or ValueError. Any other error is a fault of the monitor."""
    path = tmp_path / "switch.json"
    path.write_text(json.dumps({"dynamic_on": False}))
    training = Training(switch_file=str(path), switch_poll_seconds=0.01)
    change_sources, looked = training.session.change_sources, []
    monkeypatch.setattr(change_sources, "_agreement", _Failing(looked))
    wait_until(lambda: len(looked) > 3)
    monkeypatch.undo()
    training.finish()

    assert training.monitor.faults > 3


class _Failing:
    """An agreement with other ranks that raises an unexpected error."""

    pending = False

    def __init__(self, looked: list[str]) -> None:
        self._looked = looked

    def look(self) -> Any:
        self._looked.append("looked")
        raise TypeError(WHY)


def test_error_boundary_logs_each_place_once(caplog):
    caplog.set_level(logging.ERROR, "rankscope")
    boundary = ErrorBoundary()
    for where in ("one", "two", "one"):
        boundary.call(where, broken)

    assert (["one", "two"], 3) == (named(caplog), boundary.count)
