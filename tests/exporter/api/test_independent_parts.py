"""Independent parts of a monitor: a part that fails is logged once, and the other parts continue."""

import functools
import json
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.exporter.conftest import wait_until
from tests.exporter.parts import QUIET, Training, Watched, hooks_of, small
from tests.programs import run_program

from rankscope_exporter import AnomalyNan, Monitor
from rankscope_exporter.api.session import Session
from rankscope_exporter.control.anomaly_reactions import AnomalyCallback, CaptureController
from rankscope_exporter.control.change_sources import ChangeSources
from rankscope_exporter.control.changes import ChangeLog
from rankscope_exporter.measure.kernels.statistics_table import HostCopy
from rankscope_exporter.monitors.flight_recorder.poller import FlightRecorderPoller
from rankscope_exporter.monitors.hangs.watchdog import Watchdog
from rankscope_exporter.monitors.hardware import HardwarePoller
from rankscope_exporter.publish.console import Console
from rankscope_exporter.publish.http_server import HttpServer
from rankscope_exporter.publish.publisher import Publisher
from rankscope_exporter.publish.rank_server import RankServer
from rankscope_exporter.publish.registration import RegistrationLoop
from rankscope_exporter.publish.spool import SpoolWriter
from rankscope_exporter.training.hooks import Hooks
from rankscope_exporter.training.recorder import Recorder
from rankscope_exporter.training.sampling import ActiveQuantity

WHY = "no such device"


def broken(*_: Any, **__: Any) -> Any:
    raise OSError(WHY)


def named(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the places of all faults that were logged."""
    return [record.getMessage().partition(" failed")[0] for record in caplog.records if WHY in record.getMessage()]


# The beginning.

OPTIONAL = {
    "hardware": (HardwarePoller, "start"),
    "remarks": (Session, "_publish_notices"),
    "switching": (ChangeSources, "start"),
    "watchdog": (Watchdog, "start"),
}


def test_failed_start_of_the_optional_parts_keeps_measuring(monkeypatch, caplog):
    started: list[str] = []
    for name, (owner, method) in OPTIONAL.items():
        monkeypatch.setattr(owner, method, _noting(started, name, broken))
    with Training() as training:
        training.train(3)

    assert list(OPTIONAL) == sorted(started)
    assert [1, 2, 3] == training.steps("param_after") == training.steps("grad_reduced")
    assert len(OPTIONAL) == len(named(caplog))


def _noting(called: list[str], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        called.append(name)
        return original(*args, **named)

    return call


def test_failed_attach_stops_all_started_parts(monkeypatch, caplog):
    undone = []
    monkeypatch.setattr(Hooks, "install", broken)
    monkeypatch.setattr(Hooks, "remove", _noting(undone, "hooks", broken))
    monkeypatch.setattr(Publisher, "stop", _noting(undone, "publisher", broken))
    monkeypatch.setattr(RankServer, "close", _noting(undone, "channel", RankServer.close))
    monitor = Monitor(QUIET).attach(*small())

    assert ["hooks", "publisher", "channel"] == undone
    assert None is monitor.address
    assert ["undoing attach()", "attach()"] == named(caplog)


# The end.

ENDING = {
    "hooks": (Hooks, "remove"),
    "watchdog": (Watchdog, "stop"),
    "hardware": (HardwarePoller, "stop"),
    "last step": (Recorder, "finish"),
    "captures": (CaptureController, "finish"),
    "collectives": (FlightRecorderPoller, "stop"),
    "publisher": (Publisher, "stop"),
    "on_anomaly": (AnomalyCallback, "stop"),
    "switching": (ChangeSources, "stop"),
}


def test_failed_stop_of_the_parts_keeps_the_exit_record(monkeypatch, caplog):
    """Each part is stopped although the parts before it fail, and the port is closed."""
    ended: list[str] = []
    skipped: list[Callable[[], object]] = []

    def failing(original: Callable[..., object]) -> Callable[..., object]:
        def fail(*args: Any, **named: Any) -> object:
            skipped.append(functools.partial(original, *args, **named))
            return broken()

        return fail

    training = Training(capture={})
    for name, (owner, method) in ENDING.items():
        monkeypatch.setattr(owner, method, _noting(ended, name, failing(getattr(owner, method))))
    training.train(3)
    address = training.monitor.address
    training.finish()
    wait_until(lambda: training.events("exit"))
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{address}/healthz", timeout=5)

    monkeypatch.undo()
    for end in skipped:  # a remaining thread or hook would affect later tests
        end()

    assert set(ENDING) == set(ended)
    assert training.faults >= len(ENDING)
    assert ["capture", "detach()", "end of training"] == sorted(named(caplog))


def test_failed_removal_of_hooks_removes_the_others(monkeypatch, caplog):
    removed: list[str] = []
    training = Training(quantities=["activations", "structure", "gradients"])
    training.train()
    unhook = ActiveQuantity.unhook
    monkeypatch.setattr(
        ActiveQuantity, "unhook", lambda own: (broken if own.quantity.name == "activations" else unhook)(own)
    )
    training.session.hooks._handles.insert(0, SimpleNamespace(remove=_noting(removed, "first", broken)))
    training.session.hooks.keep(SimpleNamespace(remove=lambda: removed.append("last")))
    before = hooks_of(training.net, training.optimizer)
    training.finish()

    assert ["first", "last"] == removed
    assert 0 < hooks_of(training.net, training.optimizer) < before  # hooks of activations
    assert ["hooks of activations", "removing a hook"] == sorted(named(caplog))


PARTS = """
import os, signal, time
from rankscope_exporter.process import lifecycle

class Part:
    def __init__(self, name):
        self.name = name
    def write(self, call, *broken):
        print(call, self.name, flush=True)
        if self.name in broken:
            raise OSError("no such device")
    def abandon_after_fork(self):
        self.write("abandoned", "broken")
    def end_of_process(self, reason, error):
        self.write("ended", "broken")
    def last_records(self, name):
        if self.name == "broken":
            raise OSError("no such device")
        return lambda: self.write("heard", "waiting")

parts = [Part(name) for name in ("one", "broken", "waiting", "two")]
"""


def test_failed_monitor_at_fork_or_exit_keeps_the_others():
    done = run_program(f"""{PARTS}
for part in parts:
    lifecycle.watch(part)
if os.fork() == 0:
    os._exit(0)
os.wait()
""")

    assert 0 == done.returncode, done.stderr
    expected = [f"{what} {name}" for what in ("abandoned", "ended") for name in ("broken", "one", "two", "waiting")]
    assert expected == sorted(done.stdout.splitlines())


def test_failed_monitor_at_a_stop_signal_keeps_the_others():
    done = run_program(f"""{PARTS}
for part in parts:
    lifecycle.handle_signals(part, ["SIGTERM"])
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
""")

    assert -15 == done.returncode, done.stderr
    assert ["heard one", "heard two", "heard waiting"] == sorted(done.stdout.splitlines())
    assert 2 == done.stderr.count("OSError: no such device")


class Idle(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        """Do nothing."""


def test_unreadable_learning_rate_keeps_the_other_values():
    net, _ = small()
    optimizer = Idle(net.parameters(), lr=0.1)
    with Watched(net, optimizer) as watched:
        optimizer.param_groups[0]["lr"] = {"of": "nothing"}
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    assert [1] == watched.steps("param_before", "0.weight")
    assert 1 == watched.faults


def test_failed_copy_of_statistics_loses_only_their_rows(monkeypatch, caplog):
    """Step 2 has no gradients, and no gradients of step 1."""
    training = Training()
    training.train(loss=1.0)
    with monkeypatch.context() as patch:
        patch.setattr("rankscope_exporter.training.sampling.HostCopy", broken)
        training.monitor.end_step()
    training.net(torch.ones(2, 3))
    training.finish()

    assert ([], [(1, 1.0)], 1) == (training.rows(), training.scalars("loss"), training.faults)
    assert ["copying statistics"] == named(caplog)


def test_unreadable_statistics_keep_numbers_and_events_of_the_step(monkeypatch, caplog):
    monkeypatch.setattr(HostCopy, "finish", broken)
    with Training(rules=[AnomalyNan()]) as training:
        training.train(loss=1.0)
        training.train(loss=float("nan"))

    assert (1, 1.0) == training.scalars("loss")[0]
    assert training.events("anomaly")
    assert training.events("fault")
    assert ["computing the statistics of a step"] == named(caplog)


def test_record_refused_by_the_server_reaches_sinks_and_callbacks(monkeypatch, caplog):
    """Also if the console fails."""
    told: list[int | None] = []
    monkeypatch.setattr(CaptureController, "on_anomalies", lambda _, step, _events: told.append(step))
    training = Training(rules=[AnomalyNan()], sinks={"api": {}}, capture={})
    monkeypatch.setattr(Console, "line", broken)
    monkeypatch.setattr(training.session.publisher, "publish", broken)
    training.train(loss=float("nan"))
    training.monitor.detach()

    assert [1] == [step for step in told if step is not None]
    assert (1,) == training.monitor.sink("api").steps()
    assert "publishing a step" in named(caplog)


def test_failed_parts_of_the_page_keep_the_others(monkeypatch, caplog):
    training = Training()
    training.train()
    channel = training.session.channel
    parts = dict.fromkeys(("overhead", "dropped", "collectives", "stretch"), broken)
    monkeypatch.setattr(channel, "sources", replace(channel.sources, **parts))
    page = urllib.request.urlopen(f"{training.monitor.address}/metrics", timeout=30).read().decode()
    training.finish()

    assert "rankscope_run_info{" in page
    assert "rankscope_ring_records{" in page
    assert 4 == len(named(caplog))


@pytest.mark.parametrize("part", ["spool", "_server", "_registration"])
def test_failed_close_of_a_server_part_closes_the_others(part, monkeypatch, tmp_path):
    monkeypatch.setenv("RANKSCOPE_SPOOL_DIR", str(tmp_path))
    closed: list[str] = []
    owners = {
        "spool": (SpoolWriter, "close"),
        "_server": (HttpServer, "stop"),
        "_registration": (RegistrationLoop, "stop"),
    }
    for name, (owner, method) in owners.items():
        monkeypatch.setattr(owner, method, _noting(closed, name, broken if name == part else getattr(owner, method)))
    training = Training(serve={"ingest_url": "http://127.0.0.1:9"})
    training.finish()

    assert ["_registration", "_server", "spool"] == closed
    if part == "_server":
        monkeypatch.undo()
        training.session.channel._server.stop()


def test_fault_in_the_log_of_changes_keeps_the_switch_thread_running(monkeypatch, tmp_path):
    """An unavailable store raises RuntimeError or ValueError. Any other error is a fault of the monitor."""
    path = tmp_path / "switch.json"
    path.write_text(json.dumps({"dynamic_on": False}))
    training = Training(switch_file=str(path), switch_poll_seconds=0.01)
    looked: list[str] = []
    failing = SimpleNamespace(unread=[])
    monkeypatch.setattr(ChangeLog, "poll", _noting(looked, "looked", broken))
    monkeypatch.setattr(training.session.change_sources, "change_log", failing)
    wait_until(lambda: len(looked) > 3)
    monkeypatch.undo()
    training.finish()

    assert training.faults > 3
