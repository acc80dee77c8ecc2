"""Changes of sampling during training: the six scenarios of msprobe, calls of the script, and cleanup."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.exporter.conftest import wait_until
from tests.exporter.parts import session_of
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.reconfiguration.change_queue import StepPace
from rankscope_exporter.reconfiguration.change_sources import ChangeSources, SwitchFile

SETTINGS: dict[str, Any] = {
    "quantities": ["parameters"],
    "console": False,
    "exit_wait_seconds": 0,
    "switch_poll_seconds": 0.01,
}


class Training:
    """A training whose configuration file is edited between steps."""

    def __init__(self, path: Path, first_step: int = 0) -> None:
        torch.manual_seed(0)
        self.path = path
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.monitor = Monitor(path, first_step=first_step)
        self.monitor.attach(self.net, self.optimizer)
        session = session_of(self.monitor)
        self.change_queue, self.recorder, self.ring = session.change_queue, session.recorder, session.channel.ring

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.net(torch.ones(2, 3)).sum().backward()
            self.optimizer.step()

    def edit(self, **settings: Any) -> None:
        """Edit the file, and wait until the edit was read."""
        write(self.path, **settings)
        wait_until(lambda: self.change_queue.state()["to_come"])

    def finish(self) -> tuple[list[int], list[dict[str, Any]]]:
        """Return the numbers of the sampled steps, and the details of the switch events."""
        self.monitor.detach()
        records = self.ring.after(-1, 1 << 30).records
        events = [(record.step, event) for record in records for event in record.events]
        told = [{**json.loads(e.details), "at": step} for step, e in events if e.type == "switch" and e.details]
        assert 0 == self.monitor.faults
        return [r.step for r in records if r.statistics is not None and r.step is not None], told

    def messages(self) -> list[str]:
        return [e.message for record in self.ring.after(-1, 1 << 30).records for e in record.events if e.type == "note"]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def hook_count(net: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules())


def write(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps({**SETTINGS, **settings}, indent=2))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "monitor.json"


@pytest.fixture
def _dynamic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")


@pytest.mark.parametrize("variable", [None, "False"])
def test_scenario_1_static_mode_ignores_dynamic_on(path, monkeypatch, variable):
    if variable is not None:
        monkeypatch.setenv("DYNAMIC_MONITOR", variable)
    write(path, dynamic_on=False, times=2)
    training = Training(path)
    training.train(2)
    write(path, dynamic_on=True, every=7)
    training.train(2)

    assert ([0, 1], []) == training.finish()
    assert "rankscope-switch" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.usefixtures("_dynamic")
@pytest.mark.parametrize("settings", [{"dynamic_on": False}, {}])
def test_scenario_2_off_at_start_measures_nothing(path, settings):
    write(path, **settings)
    training = Training(path)
    training.train(3)

    assert ([], []) == training.finish()


@pytest.mark.usefixtures("_dynamic")
def test_scenario_3_on_at_start_measures_from_step_1(path):
    write(path, dynamic_on=True, times=2, options={"parameters": {"start_step": 50}})
    training = Training(path)
    training.train(5)
    steps, told = training.finish()

    assert [1, 2] == steps
    assert [(1, "file"), (3, "times")] == [(event["at"], event["source"]) for event in told]
    assert json.loads(path.read_text())["dynamic_on"] is False


@pytest.mark.usefixtures("_dynamic")
def test_scenario_4_switched_on_in_step_3_measures_from_step_4(path):
    write(path, dynamic_on=False)
    training = Training(path)
    training.train(4)
    training.edit(dynamic_on=True, times=2, options={"parameters": {"start_step": 50}})
    training.train(5)

    assert [4, 5] == training.finish()[0]


@pytest.mark.usefixtures("_dynamic")
def test_scenario_5_edit_restarts_the_count_and_times_0_stops(path):
    write(path, dynamic_on=True, times=3)
    training = Training(path)
    training.train(3)  # sampled: 1, 2
    training.edit(dynamic_on=True, times=3, quantities=["gradients"])
    training.train(2)  # 3, 4: the third sampled step is still missing
    training.edit(dynamic_on=True, times=0)
    training.train(3)
    steps, told = training.finish()

    assert [1, 2, 3, 4] == steps
    assert [1, 3, 5, 6] == [event["at"] for event in told]
    assert (["parameters"], ["gradients"]) == (told[1]["was"]["quantities"], told[1]["now"]["quantities"])
    assert json.loads(path.read_text())["dynamic_on"] is False


@pytest.mark.usefixtures("_dynamic")
def test_edit_restarts_the_count_of_unchanged_quantities(path):
    write(path, dynamic_on=True, times=3)
    training = Training(path)
    training.train(3)  # 1, 2
    training.edit(dynamic_on=True, times=3, every=2)
    training.train(8)

    assert [1, 2, 3, 5, 7] == training.finish()[0]


@pytest.mark.usefixtures("_dynamic")
def test_scenario_6_file_is_off_after_the_end_and_can_switch_on(path):
    write(path, dynamic_on=True, times=1)
    path.chmod(0o640)
    training = Training(path)
    training.train(3)  # 1
    wait_until(lambda: json.loads(path.read_text())["dynamic_on"] is False)
    training.train(2)
    training.edit(dynamic_on=True, times=2)
    training.train(4)
    steps, told = training.finish()

    assert [1, 5, 6] == steps
    assert ["file", "times", "file", "times"] == [event["source"] for event in told]
    assert 0o640 == path.stat().st_mode & 0o777
    assert [path] == list(path.parent.iterdir())


@pytest.mark.usefixtures("_dynamic")
def test_rank_without_quantities_does_not_end_sampling(path):
    """Otherwise the rank would switch off the file while other ranks measure."""
    write(path, dynamic_on=True, times=2, options={"parameters": {"ranks": [1]}})
    training = Training(path)
    training.train(4)
    steps, told = training.finish()

    assert [] == steps
    assert ["file"] == [event["source"] for event in told]
    assert json.loads(path.read_text())["dynamic_on"] is True


@pytest.mark.usefixtures("_dynamic")
def test_dynamic_on_false_stops_immediately(path):
    write(path, dynamic_on=True)
    training = Training(path)
    training.train(3)
    training.edit(dynamic_on=False)
    training.train(2)

    assert [1, 2] == training.finish()[0]


@pytest.mark.usefixtures("_dynamic")
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"dynamic_on": tr', "Expecting value"),
        ('{"dynamic_on": true, "quantitis": []}', "Did you mean quantities"),
        ('{"dynamic_on": true, "options": {"parameters": {"every": 0}}}', "every must be a whole number of at least 1"),
        ("[]", "expected a table of settings"),
        ("\udcff", "can't decode"),
    ],
)
def test_invalid_edit_keeps_the_configuration_and_is_reported(path, text, why, capfd):
    write(path, dynamic_on=True, console=True)
    training = Training(path)
    training.train(2)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    wait_until(training.messages)
    training.train(2)
    messages = training.messages()
    steps, told = training.finish()

    assert [1, 2, 3] == steps
    assert 1 == len(told) == len(messages)
    assert why in messages[0]
    assert 1 == capfd.readouterr().err.count(why)


def test_edit_counts_once_unchanged_between_two_polls(path):
    """An editor that writes in two parts leaves half a file for a moment. This is not an invalid edit."""
    write(path)
    file = SwitchFile(path)
    file.read()
    seen = []
    for text in ('{"every": 2', '{"every": 2}', '{"every": 3}'):
        path.write_text(text)
        seen.append(file.poll())
    seen += [file.poll(), file.poll()]

    assert [None, None, None, {"every": 3}, None] == [edit and edit.document for edit in seen]


def test_settings_that_need_a_restart_are_named(path, monkeypatch):
    monkeypatch.setenv("RANKSCOPE_SWITCH_FILE", str(path))
    other = path.with_name("other.json")
    write(other)
    training = Training(other)
    write(path, dynamic_on=True, zero_below=0.5)  # a file that did not exist before
    wait_until(lambda: training.change_queue.state()["to_come"])
    training.train(1)
    _, told = training.finish()

    assert ["zero_below"] == told[0]["needs_restart"]


def test_call_changes_sampling_and_off_removes_all_hooks(path):
    write(path)
    training = Training(path)
    module_hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in training.net.modules())  # noqa: E731 - counts now
    training.train(1)
    before = module_hooks()  # without the hook on the first forward pass
    training.monitor.switch({"quantities": ["activations", "parameters"]})
    training.train(2)
    entries = len(training.change_queue._active_quantities.plan)
    during = module_hooks()
    training.monitor.switch(on=False)
    training.train(2)
    after = module_hooks()
    training.monitor.switch({"quantities": ["activations", "parameters"], "every": 2})
    training.train(3)
    steps, told = training.finish()

    assert [0, 1, 2, 5, 7] == steps
    assert [1, 3, 5] == [event["at"] for event in told]
    assert entries == len(training.change_queue._active_quantities.plan)  # the same rows are used again
    assert during > after
    assert before == after
    assert 0 == module_hooks()


def test_invalid_call_is_logged_and_changes_nothing(path, caplog):
    write(path)
    training = Training(path)
    training.monitor.switch({"quantities": ["gradient"]})
    (line,) = caplog.messages
    assert line.startswith("switch() changes nothing: quantities: 'gradient' is unknown")
    training.train(1)

    assert ([0], []) == training.finish()


def test_activations_of_the_first_step_include_the_root(path):
    """Hooks that are registered in the model's own pre-hook would miss the model itself."""
    write(path)
    training = Training(path)
    training.train(1)
    training.monitor.switch({"quantities": ["activations"]})
    training.train(1)
    training.monitor.detach()
    (record,) = (r for r in training.ring.after(-1, 1 << 30).records if r.step == 1 and r.statistics is not None)
    kinds = {(entry.kind, entry.module) for entry in record.statistics.plan.plan.entries}

    assert {("act_in", ""), ("act_out", ""), ("act_in", "0"), ("act_out", "0")} <= kinds


def test_last_of_two_changes_for_one_step_applies_from_its_first_module(path):
    write(path)
    training = Training(path)
    training.train(1)
    training.monitor.switch({"quantities": ["parameters"]})
    training.monitor.switch({"quantities": ["activations"]})
    training.train(1)
    measured, told = training.finish()
    (record,) = (r for r in training.ring.after(-1, 1 << 30).records if r.step == 1 and r.statistics is not None)
    kinds = {(entry.kind, entry.module) for entry in record.statistics.plan.plan.entries}

    assert 1 in measured
    assert [(1, ["parameters"]), (1, ["activations"])] == [(event["at"], event["now"]["quantities"]) for event in told]
    assert {("act_in", ""), ("act_out", ""), ("act_in", "0"), ("act_out", "0")} <= kinds


def test_quantity_dropped_and_restored_at_one_step_continues(path):
    write(path, quantities=["activations"])
    training = Training(path, first_step=1)
    training.train(1)
    hooks = hook_count(training.net)  # without the hook on the first forward pass

    for quantities in (["parameters", "linear"], ["activations"], ["router"], ["activations"]):
        training.monitor.switch({"quantities": quantities})
    training.train(2)

    assert hooks == hook_count(training.net)  # the replaced change has left no hooks
    rows = [row.step for row in training.monitor.current("act_in")]
    assert [3] * 4 == rows  # the model and its three modules
    training.finish()


def test_detach_leaves_no_trace(path, monkeypatch):
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    write(path, dynamic_on=True, quantities=["activations", "gradients", "parameters"])
    threads, files = set(threading.enumerate()), open_files()
    training = Training(path)
    training.train(2)
    training.edit(dynamic_on=True, quantities=["activations", "optimizer_state"])
    training.train(2)
    training.finish()
    hooks = [
        *(m._forward_hooks for m in training.net.modules()),
        *(m._forward_pre_hooks for m in training.net.modules()),
        *(m._backward_hooks for m in training.net.modules()),
        *(p._post_accumulate_grad_hooks or {} for p in training.net.parameters()),
        training.optimizer._optimizer_step_pre_hooks,
        training.optimizer._optimizer_step_post_hooks,
    ]

    assert [0] * len(hooks) == [len(found) for found in hooks]
    assert set() == set(threading.enumerate()) - threads
    assert files == open_files()
    assert [path] == list(path.parent.iterdir())


def test_training_with_switches_is_bit_identical(path):
    write(path)
    training, twin = Training(path), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    twin.load_state_dict(training.net.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(6):
        if step % 2:
            training.monitor.switch({"quantities": ["activations", "gradients"]}, on=step != 3)
        training.train(1)
        optimizer.zero_grad()
        twin(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    training.finish()

    assert all(torch.equal(a, b) for a, b in zip(training.net.parameters(), twin.parameters(), strict=True))


def test_unattached_monitor_accepts_switch():
    Monitor(MonitorConfig(console=False)).switch(on=False)


class Held:
    """A lock that another thread holds until it is `free`. It records the requested timeouts."""

    def __init__(self) -> None:
        self.free = False
        self.waits: list[float] = []

    def acquire(self, timeout: float) -> bool:
        self.waits.append(timeout)
        return self.free

    def release(self) -> None:
        pass


def test_training_waits_only_once_for_an_unresponsive_store():
    lock, arrived = Held(), []
    agreement: Any = SimpleNamespace(must_resolve=lambda _step: True, resolve=lambda step: arrived.append(step) or [])
    change_queue: Any = None  # not called while nothing is agreed
    change_sources = ChangeSources(
        MonitorConfig(),
        change_queue,
        StepPace(1),
        parts=lambda _: [],
        reaction=lambda *_: None,
        boundary=ErrorBoundary(),
        tell=print,
        agreement=agreement,
        first_step=1,
    )
    change_sources._agreeing = lock
    for step in (1, 2, 3):
        change_sources.on_before_step(step)
    lock.free = True
    change_sources.on_before_step(4)
    lock.free = False
    change_sources.on_before_step(5)

    assert [4] == arrived
    assert [2.0, 0.0, 0.0, 0.0, 2.0] == lock.waits
