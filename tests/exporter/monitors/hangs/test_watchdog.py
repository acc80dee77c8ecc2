"""The watchdog reports a hanging training once, reports no busy one, and does not change the training result."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch
from tests.exporter.parts import session_of
from torch import nn

from rankscope_exporter import ConfigError, Monitor, MonitorConfig


def train(monitor: Monitor, steps: int, *, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(steps):
        net(torch.rand(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=1.0)


def made() -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    return {"net": net, "optimizer": torch.optim.AdamW(net.parameters(), lr=0.1)}


def watching(**settings: Any) -> MonitorConfig:
    return MonitorConfig(**{"console": False, "exit_wait_seconds": 0, "hang_after_seconds": 0.4, **settings})


def stand_still_at(here: threading.Event) -> None:
    here.wait(30)


def test_hang_and_its_end_are_published_and_printed_once(reader, eventually, capfd):
    parts = made()
    resume = threading.Event()
    with Monitor(watching(console=True)).attach(parts["net"], parts["optimizer"]) as monitor:
        events = reader(monitor).events
        train(monitor, 3, **parts)
        waker = threading.Thread(
            target=lambda: (eventually(lambda: [e for e in events() if e["type"] == "stacks"]), resume.set())
        )
        waker.start()
        stand_still_at(resume)
        waker.join()
        train(monitor, 3, **parts)
        eventually(lambda: [e for e in events() if e["type"] == "hang" and '"ended"' in e["details"]])
        reported = [event for event in events() if event["type"] in ("hang", "stacks")]

        assert ["hang", "stacks", "hang"] == [event["type"] for event in reported]
        assert ["critical", "critical", "info"] == [event["severity"] for event in reported]
        assert {2, 3} >= {
            event["step"] for event in reported[:2]
        }  # finished steps: the begin of a step is not progress
        stacks = json.loads(reported[1]["details"])
        assert "hang" == stacks["reason"]
        assert "stand_still_at" in [frame[2] for frame in stacks["threads"][0]["frames"]]
        assert 0 == monitor.faults
    output = capfd.readouterr().err

    assert 1 == output.count("no sign of training for")
    assert "called at test_watchdog.py:" in output
    assert 1 == output.count("training continues after")


@pytest.mark.thorough
def test_evaluation_is_not_a_hang(reader, eventually):
    parts = made()
    settings = watching(hang_after_seconds=0.8, hang_in_phase_after_seconds=60)
    with Monitor(settings).attach(parts["net"], parts["optimizer"]) as monitor:
        train(monitor, 3, **parts)
        eventually(lambda: session_of(monitor).channel.progress()[0])
        with monitor.phase("evaluation"):
            threading.Event().wait(1.5)
        parts["net"].eval()
        for _ in range(6):  # not announced, but the model runs
            with torch.no_grad():
                parts["net"](torch.rand(3, 4))
            threading.Event().wait(0.2)

        assert [] == [event for event in reader(monitor).events() if event["type"] == "hang"]


def test_dump_stacks_returns_text_and_publishes_the_event(reader, eventually):
    parts = made()
    monitor = Monitor(watching())

    assert None is monitor.dump_stacks()

    with monitor.attach(parts["net"], parts["optimizer"]):
        first, second = monitor.dump_stacks(), monitor.dump_stacks()
        recorded = [event for event in reader(monitor).events() if event["type"] == "stacks"]

        assert "test_dump_stacks_returns_text_and_publishes_the_event" in first.splitlines()[1]
        assert first == second  # a request within 2 s gets the same result
        assert ["call"] == [json.loads(event["details"])["reason"] for event in recorded]


def test_training_is_bit_identical_while_stacks_are_taken():
    def result(monitor: Monitor | None) -> list[torch.Tensor]:
        parts = made()
        if monitor is not None:
            monitor.attach(parts["net"], parts["optimizer"])
        for _ in range(5):
            train(monitor or Monitor(watching(enabled=False)), 4, **parts)
            if monitor is not None:
                session_of(monitor).diagnosis._taken_at = float("-inf")
                assert monitor.dump_stacks()
        if monitor is not None:
            monitor.detach()
        return [*parts["net"].state_dict().values(), torch.get_rng_state()]

    for expected, given in zip(result(None), result(Monitor(watching())), strict=True):
        assert torch.equal(expected, given)


@pytest.mark.parametrize("limit", [-1, float("nan"), float("inf"), "300", True])
def test_invalid_limit_is_refused(limit):
    with pytest.raises(ConfigError, match="hang_after_seconds"):
        MonitorConfig(hang_after_seconds=limit)


def test_limit_of_zero_starts_no_thread():
    parts, before = made(), set(threading.enumerate())
    with Monitor(watching(hang_after_seconds=0)).attach(parts["net"], parts["optimizer"]):
        assert "rankscope-watchdog" not in {thread.name for thread in set(threading.enumerate()) - before}


def test_unreadable_signal_file_leaves_the_hang_detection(monkeypatch, reader, eventually):
    def fail(_self):
        raise OSError("no such file")

    monkeypatch.setattr("rankscope_exporter.monitors.hangs.diagnosis.StackSignal.written", fail)
    parts = made()
    with Monitor(watching(stacks_signal="SIGUSR2")).attach(parts["net"], parts["optimizer"]) as monitor:
        train(monitor, 3, **parts)
        eventually(lambda: [event for event in reader(monitor).events() if event["type"] == "stacks"])


def test_hang_that_cannot_be_published_is_printed(monkeypatch, eventually, capfd):
    def fail(*_args, **_more):
        raise OSError("no space left on device")

    monkeypatch.setattr("rankscope_exporter.monitors.hangs.diagnosis.Diagnosis.take", fail)
    monkeypatch.setattr("rankscope_exporter.monitors.hangs.diagnosis.Diagnosis.publish", fail)
    parts, output = made(), []
    with Monitor(watching(console=True)).attach(parts["net"], parts["optimizer"]) as monitor:
        train(monitor, 3, **parts)
        eventually(lambda: output.append(capfd.readouterr().err) or "no sign of training for" in "".join(output))
        train(monitor, 3, **parts)
        eventually(lambda: output.append(capfd.readouterr().err) or "training continues after" in "".join(output))
