"""Tests of msprobe's configuration as a watched file: `DYNAMIC_MONITOR=True`, comments and keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exporter.compat.msprobe.monitored_runs import QUIET, Run, adam, batch, left, model
from tests.exporter.conftest import wait_until
from tests.exporter.parts import session_of

from rankscope_exporter import Monitor
from rankscope_exporter.compat.msprobe import TrainerMon
from rankscope_exporter.config.loader import without_comments

COMMENT = '{ // "dynamic_on": true switches on\n'


def write(path: Path, **document: Any) -> None:
    path.write_text(COMMENT + json.dumps({**QUIET, "format": "api", **document}).removeprefix("{"))


class Training:
    """A model in training while its configuration file is edited."""

    def __init__(self, folder: Path, attach: Callable[..., Monitor], **document: Any) -> None:
        self.path, self.net = folder / "monitor_config.json", model()
        self.optimizer = adam(self.net)
        write(self.path, wg_distribution=True, **document)
        self.monitor = attach(self.path, self.net, self.optimizer)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.net(batch()).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def edit(self, **document: Any) -> None:
        write(self.path, **document)
        wait_until(lambda: self.monitor.measuring["to_come"])

    def finish(self) -> Run:
        return left(self.monitor, self.net, self.path.parent)


def by_trainer_mon(path: Path, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Monitor:
    monitor = TrainerMon(path)
    monitor.set_monitor(net, optimizer)
    assert monitor.monitor is not None
    return monitor.monitor


def by_monitor(path: Path, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Monitor:
    return Monitor(path).attach(net, optimizer)


@pytest.fixture(params=[by_trainer_mon, by_monitor])
def attach(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    return request.param


def test_dynamic_on_switches_and_the_end_is_written_to_the_file(tmp_path, attach):
    training = Training(tmp_path, attach, dynamic_on=False)
    training.train(3)
    edited = {"targets": {"head": {"output": "tensor"}}, "collect_times": 2, "start_step": 50}
    training.edit(xy_distribution=True, dynamic_on=True, **edited)
    training.train(4)
    run = training.finish()
    text = training.path.read_text()
    told = [json.loads(e.details) for r in run.records for e in r.events if e.type == "switch" and e.details]

    assert {"act_out"} == run.kinds()
    assert [4, 5] == run.steps()
    assert 0 == run.faults
    assert [[], []] == [event["needs_restart"] for event in told]
    assert text.startswith(COMMENT), "the comment is as it was"
    assert json.loads(without_comments(text))["dynamic_on"] is False


def test_getters_follow_the_ops_of_an_edit(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    path = tmp_path / "monitor_config.json"
    write(path, wg_distribution=True, dynamic_on=True, ops=["norm"])
    monitor = TrainerMon(path)
    net = model()
    optimizer = adam(net)
    monitor.set_monitor(net, optimizer)
    assert monitor.monitor is not None
    write(path, wg_distribution=True, dynamic_on=True, ops=["max", "nans"])
    wait_until(lambda: monitor.ops == ["max", "nans"])
    for _ in range(2):
        net(batch()).square().mean().backward()
        reduced, _ = monitor.generate_wgrad_metrics()
        optimizer.step()
        optimizer.zero_grad()
    left(monitor.monitor, net, tmp_path)

    assert {("max", "nans")} == {tuple(numbers) for numbers in reduced.values()}


def test_dynamic_on_at_start_measures_from_msprobes_step_1(tmp_path, attach):
    training = Training(tmp_path, attach, dynamic_on=True)
    training.train(3)

    assert [2, 3] == training.finish().steps()


def test_invalid_edit_keeps_the_settings_and_reports_the_reason(tmp_path, attach):
    training = Training(tmp_path, attach, dynamic_on=True)
    training.train(3)
    write(training.path, wg_distributon=True, dynamic_on=True)
    ring = session_of(training.monitor).channel.ring
    wait_until(
        lambda: any(r.events and "wg_distributon" in r.events[0].message for r in ring.after(-1, 1 << 40).records)
    )
    training.train(1)

    assert [2, 3, 4] == training.finish().steps()
