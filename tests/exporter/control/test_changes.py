"""Changes of sampling during training: the six scenarios of msprobe, calls of the script, and cleanup."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exporter import parts
from tests.exporter.conftest import wait_until
from tests.exporter.parts import hooks_of

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.control.change_sources import SwitchFile
from rankscope_exporter.control.changes import ChangeLog

SETTINGS: dict[str, Any] = parts.QUIET | {"quantities": ["parameters"], "switch_poll_seconds": 0.01}


class Training(parts.Training):
    def __init__(self, path: Path, **settings: Any) -> None:
        write(path, **settings)
        self.path = path
        super().__init__(monitor=Monitor(path, first_step=0))
        self.change_queue = self.session.change_queue

    def edit(self, **settings: Any) -> None:
        write(self.path, **settings)
        wait_until(lambda: self.change_queue.state()["to_come"])

    def ended(self) -> tuple[list[int], list[dict[str, Any]]]:
        """Return the numbers of the sampled steps, and the details of the switch events."""
        self.monitor.detach()
        told = [{**json.loads(e.details), "at": step} for step, e in self.events("switch") if e.details]
        assert 0 == self.faults
        return self.measured(), told

    def is_on(self) -> bool:
        return bool(json.loads(self.path.read_text())["dynamic_on"])

    def modules_of(self, step: int) -> set[tuple[str, str | None]]:
        return {(row.entry.kind, row.entry.module) for row in self.rows("act_in", "act_out") if row.step == step}


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


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
    training = Training(path, dynamic_on=False, times=2)
    training.train(2)
    write(path, dynamic_on=True, every=7)
    training.train(2)

    assert ([0, 1], []) == training.ended()
    assert "rankscope-switch" not in {thread.name for thread in threading.enumerate()}


LATER: dict[str, Any] = {"options": {"parameters": {"start_step": 50}}}  # a change begins immediately
ON = {"dynamic_on": True}


@pytest.mark.usefixtures("_dynamic")
@pytest.mark.parametrize(
    ("settings", "edit", "expected", "told", "is_on"),
    [
        ({"dynamic_on": False}, None, [], [], False),
        ({}, None, [], [], None),
        ({**ON, "times": 2, **LATER}, None, [1, 2], [(1, "file"), (3, "times")], False),
        ({"dynamic_on": False}, {**ON, "times": 2, **LATER}, [4, 5], [(4, "file"), (6, "times")], False),
        (ON, {"dynamic_on": False}, [1, 2, 3], [(1, "file"), (4, "file")], False),
        # Otherwise a rank without quantities would switch off the file while other ranks measure.
        ({**ON, "times": 2, "options": {"parameters": {"ranks": [1]}}}, None, [], [(1, "file")], True),
    ],
    ids=["2, off", "2, not set", "3, on at start", "4, switched on in step 3", "switched off", "other ranks only"],
)
def test_scenarios_2_to_4_of_on_and_off(settings, edit, expected, told, is_on, path):
    training = Training(path, **settings)
    training.train(4)
    if edit is not None:
        training.edit(**edit)
    training.train(5)
    steps, found = training.ended()

    assert (expected, told) == (steps, [(event["at"], event["source"]) for event in found])
    assert is_on == json.loads(path.read_text()).get("dynamic_on")


@pytest.mark.usefixtures("_dynamic")
def test_scenario_5_edit_restarts_the_count_and_times_0_stops(path):
    """The count of unchanged quantities too."""
    training = Training(path, dynamic_on=True, times=3)
    training.train(3)  # sampled: 1, 2
    training.edit(dynamic_on=True, times=3, quantities=["gradients"])
    training.train(2)  # 3, 4: the third sampled step is still missing
    training.edit(dynamic_on=True, times=3, quantities=["gradients"], every=2)
    training.train(8)  # 5, 7, 9
    training.edit(dynamic_on=True, times=0)
    training.train(3)
    steps, told = training.ended()

    assert [1, 2, 3, 4, 5, 7, 9] == steps
    assert ["file", "file", "file", "times", "file", "times"] == [event["source"] for event in told]
    assert [1, 3, 5, 10, 13, 14] == [event["at"] for event in told]
    assert (["parameters"], ["gradients"]) == (told[1]["was"]["quantities"], told[1]["now"]["quantities"])
    assert not training.is_on()


@pytest.mark.usefixtures("_dynamic")
def test_scenario_6_file_is_off_after_the_end_and_can_switch_on(path):
    path.touch(0o640)
    training = Training(path, dynamic_on=True, times=1)
    training.train(3)  # 1
    wait_until(lambda: not training.is_on())
    training.train(2)
    training.edit(dynamic_on=True, times=2)
    training.train(4)
    steps, told = training.ended()

    assert [1, 5, 6] == steps
    assert ["file", "times", "file", "times"] == [event["source"] for event in told]
    assert 0o640 == path.stat().st_mode & 0o777
    assert [path] == list(path.parent.iterdir())


SWITCH_FILES = {
    "switch.toml": """# set dynamic_on = true to sample\nnote = "dynamic_on = true"\ndynamic_on = true # and times""",
    "switch.json": '{ // "dynamic_on": true\n"note": "dynamic_on: true", "dynamic_on": true}',
}


@pytest.mark.parametrize("name", SWITCH_FILES)
def test_end_of_sampling_edits_the_setting_and_no_example_of_it(name, tmp_path):
    before, setting, after = SWITCH_FILES[name].rpartition("dynamic_on")
    file = SwitchFile(tmp_path / name)
    file.path.write_text(SWITCH_FILES[name])
    file.poll(is_first=True)

    assert [True, False] == [file.switch_off(), file.switch_off()]  # the second time, it is off already
    assert before + setting + after.replace("true", "false") == file.path.read_text()


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
    training = Training(path, dynamic_on=True, console=True)
    training.train(2)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    wait_until(lambda: training.messages("note"))
    training.train(2)
    messages = training.messages("note")
    steps, told = training.ended()

    assert [1, 2, 3] == steps
    assert 1 == len(told) == len(messages)
    assert why in messages[0]
    assert 1 == capfd.readouterr().err.count(why)


def test_edit_counts_once_unchanged_between_two_polls(path):
    """An editor that writes in two parts leaves half a file for a moment. This is not an invalid edit."""
    write(path)
    file = SwitchFile(path)
    file.poll(is_first=True)
    seen = []
    for text in ('{"every": 2', '{"every": 2}', '{"every": 3}'):
        path.write_text(text)
        seen.append(file.poll())
    seen += [file.poll(), file.poll()]

    assert [None, None, None, '{"every": 3}', None] == seen


def test_settings_that_need_a_restart_are_named(path, monkeypatch):
    monkeypatch.setenv("RANKSCOPE_SWITCH_FILE", str(path))
    training = Training(path.with_name("other.json"))
    write(path, dynamic_on=True, zero_below=0.5)  # a file that did not exist before
    wait_until(lambda: training.change_queue.state()["to_come"])
    training.train()

    assert ["zero_below"] == training.ended()[1][0]["needs_restart"]


def test_call_changes_sampling_and_off_removes_all_hooks(path):
    training = Training(path)
    training.train()
    before = hooks_of(training.net)  # without the hook on the first forward pass
    training.monitor.switch({"quantities": ["activations", "parameters"]})
    training.train(2)
    during = hooks_of(training.net)
    training.monitor.switch(on=False)
    training.train(2)
    after = hooks_of(training.net)
    training.monitor.switch({"quantities": ["activations", "parameters"], "every": 2})
    training.train(3)
    steps, told = training.ended()
    plans = {record.step: record.statistics.plan for record in training.records if record.statistics is not None}

    assert ([0, 1, 2, 5, 7], [1, 3, 5]) == (steps, [event["at"] for event in told])
    assert plans[2].hash == plans[5].hash  # the same rows are used again
    assert during > after == before
    assert 0 == hooks_of(training.net)


def test_invalid_call_is_logged_and_changes_nothing(path, caplog):
    training = Training(path)
    training.monitor.switch({"quantities": ["gradient"]})
    (line,) = caplog.messages
    training.train()

    assert line.startswith("switch() changes nothing: quantities: 'gradient' is unknown")
    assert ([0], []) == training.ended()


@pytest.mark.parametrize("changes", [(["activations"],), (["parameters"], ["activations"])])
def test_last_of_two_changes_for_one_step_applies_from_its_first_module(path, changes):
    """Hooks that are registered in the model's own pre-hook would miss the model itself."""
    training = Training(path)
    training.train()
    for quantities in changes:
        training.monitor.switch({"quantities": quantities})
    training.train()
    _, told = training.ended()

    assert [(1, quantities) for quantities in changes] == [(one["at"], one["now"]["quantities"]) for one in told]
    assert {("act_in", ""), ("act_out", ""), ("act_in", "0"), ("act_out", "0")} <= training.modules_of(1)


def test_quantity_dropped_and_restored_at_one_step_continues(path):
    training = Training(path, quantities=["activations"])
    training.train()
    hooks = hooks_of(training.net)  # without the hook on the first forward pass
    for quantities in (["parameters", "linear"], ["activations"], ["router"], ["activations"]):
        training.monitor.switch({"quantities": quantities})
    training.train(2)

    assert hooks == hooks_of(training.net)  # the replaced change has left no hooks
    assert [2] * 4 == [row.step for row in training.monitor.current("act_in")]  # the model and its three modules
    training.ended()


@pytest.mark.usefixtures("_dynamic")
def test_detach_leaves_no_trace(path):
    threads, files = set(threading.enumerate()), open_files()
    training = Training(path, dynamic_on=True, quantities=["activations", "gradients", "parameters"])
    training.train(2)
    training.edit(dynamic_on=True, quantities=["activations", "optimizer_state"])
    training.train(2)
    attached = hooks_of(training.net, training.optimizer)
    training.ended()
    training.train()

    assert attached > 0 == hooks_of(training.net, training.optimizer)
    assert (None, 0) == (training.monitor.address, training.faults)
    assert set() == set(threading.enumerate()) - threads
    assert files == open_files()
    assert [path] == list(path.parent.iterdir())


def test_training_with_switches_is_bit_identical(path):
    training, (twin, optimizer) = Training(path), parts.small()
    for step in range(6):
        if step % 2:
            training.monitor.switch({"quantities": ["activations", "gradients"]}, on=step != 3)
        training.train()
        optimizer.zero_grad()
        twin(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    training.ended()

    assert all(map(torch.equal, training.net.parameters(), twin.parameters()))


def test_unattached_monitor_accepts_switch():
    Monitor(MonitorConfig(console=False)).switch(on=False)


def test_change_is_late_if_a_step_has_begun_since_it_is_valid(path):
    """Step numbers have gaps. A change that is valid from a step without a number is not late at the next one."""
    training = Training(path)
    queue = training.change_queue
    queue.on_before_step(10)
    for step, read_at in ((14, 20), (15, 30)):
        queue.put_sampling(step, "file", queue.sampling, [])
        queue.on_before_step(read_at)
    training.train()

    assert [0, 15] == [told["late_steps"] for told in training.ended()[1]]


class UnresponsiveStore(torch.distributed.HashStore):
    """A store that answers when the event is set."""

    responds = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.responds.wait()
        return super().check(keys)


def test_training_does_not_wait_for_an_unresponsive_store(path):
    training, store = Training(path), UnresponsiveStore()
    training.session.change_sources.change_log = ChangeLog(
        store, "log", lambda: (3, None), margin_seconds=1
    )  # 4 steps later
    training.monitor.switch(on=False)
    training.train(4)
    store.responds.set()
    wait_until(lambda: training.change_queue.state()["to_come"])
    training.train(5)

    assert (list(range(7)), [7]) == (training.ended()[0], [step for step, _ in training.events("switch")])
