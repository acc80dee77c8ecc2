"""The watchdog reports a hanging training once, reports no busy one, and does not change the training result."""

import json
import math
import threading
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.exporter.parts import session_of
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.monitors.hangs.watchdog import HangLimits, Watchdog
from rankscope_exporter.process.errors import ErrorBoundary

LIMITS = HangLimits(training=10, in_phase=60)


def test_hang_and_its_end_are_reported_once():
    lines: list[str] = []
    watch = Watchdog(
        limits=LIMITS, stack_signal=None, diagnosis=Mock(rank=3), boundary=ErrorBoundary(),
        progress=lambda: (7, None), planned_steps=9, print_line=lines.append,
    )  # fmt: skip
    began, ended = "rank 3: no sign of training for {} s, after step 7", "rank 3: training continues after {} s"
    expected = [(100, 100, ""), (100, 109.9, ""), (100, 110, began.format(10)), (100, 111, ""), (100, 500, "")]
    expected += [(505, 506, ended.format(405)), (505, 514, ""), (505, 515, began.format(10))]
    for active_at, now, text in expected:
        lines.clear()
        watch.active_at = active_at
        watch.check(now, 0.0)

        assert [text] * bool(text) == [line[: len(text)] for line in lines]


@pytest.mark.parametrize(
    ("limits", "state", "seconds"),
    [
        *((LIMITS, {}, 10), (LIMITS, {"phase": "evaluation"}, 60), (LIMITS, {"step": None}, 60)),
        (HangLimits(training=10, in_phase=1), {"phase": "evaluation"}, 10),  # never below that of the training
        (LIMITS, {"is_done": True}, math.inf),
        (HangLimits(training=0, in_phase=60), {}, math.inf),
        (HangLimits(training=0, in_phase=60), {"phase": "evaluation"}, math.inf),
    ],
)
def test_limit_depends_on_the_state_of_the_training(limits, state, seconds):
    assert seconds == limits.at(**{"step": 3, "phase": None, "is_done": False, **state})


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


def attached(parts: dict[str, Any], **settings: Any) -> Monitor:
    given = {"console": False, "exit_wait_seconds": 0, "statistics": "torch", "hang_after_seconds": 0.4, **settings}
    return Monitor(MonitorConfig(**given)).attach(parts["net"], parts["optimizer"])


def stand_still_at(here: threading.Event) -> None:
    here.wait(30)


def of_type(reader: Any, monitor: Monitor, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in reader(monitor).events() if event["type"] in kinds]


def test_hang_and_its_end_are_published_and_printed_once(reader, eventually, capfd):
    parts = made()
    resume = threading.Event()
    with attached(parts, console=True) as monitor:
        train(monitor, 3, **parts)
        waker = threading.Thread(target=lambda: (eventually(lambda: of_type(reader, monitor, "stacks")), resume.set()))
        waker.start()
        stand_still_at(resume)
        waker.join()
        train(monitor, 3, **parts)
        reported = eventually(lambda: (found := of_type(reader, monitor, "hang", "stacks"))[2:] and found)

        assert ["hang", "stacks", "hang"] == [event["type"] for event in reported]
        assert ["critical", "critical", "info"] == [event["severity"] for event in reported]
        # Finished steps: the begin of a step is not progress.
        assert {2, 3} >= {event["step"] for event in reported[:2]}
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
    with attached(parts, hang_after_seconds=0.8, hang_in_phase_after_seconds=60) as monitor:
        train(monitor, 3, **parts)
        eventually(lambda: session_of(monitor).channel.step)
        with monitor.phase("evaluation"):
            threading.Event().wait(1.5)
        parts["net"].eval()
        for _ in range(6):  # not announced, but the model runs
            with torch.no_grad():
                parts["net"](torch.rand(3, 4))
            threading.Event().wait(0.2)

        assert [] == of_type(reader, monitor, "hang")


def test_dump_stacks_returns_text_and_publishes_the_event(reader, eventually):
    assert None is Monitor({"console": False}).dump_stacks()

    with attached(made()) as monitor:
        first, second = monitor.dump_stacks(), monitor.dump_stacks()
        recorded = of_type(reader, monitor, "stacks")

        assert "test_dump_stacks_returns_text_and_publishes_the_event" in first.splitlines()[1]
        assert first == second  # a request within 2 s gets the same result
        assert ["call"] == [json.loads(event["details"])["reason"] for event in recorded]


def test_training_is_bit_identical_while_stacks_are_taken(monkeypatch):
    monkeypatch.setattr("rankscope_exporter.monitors.hangs.diagnosis.MIN_SECONDS", 0.0)

    def result(*, is_watched: bool) -> list[torch.Tensor]:
        parts = made()
        with attached(parts, enabled=is_watched) as monitor:
            for _ in range(5):
                train(monitor, 4, **parts)
                assert is_watched is (monitor.dump_stacks() is not None)
        return [*parts["net"].state_dict().values(), torch.get_rng_state()]

    for expected, given in zip(result(is_watched=False), result(is_watched=True), strict=True):
        assert torch.equal(expected, given)


def test_limit_of_zero_starts_no_thread():
    before = set(threading.enumerate())
    with attached(made(), hang_after_seconds=0):
        assert "rankscope-watchdog" not in {thread.name for thread in set(threading.enumerate()) - before}


def test_hang_that_cannot_be_published_is_printed(monkeypatch, eventually, capfd):
    def fail(*_args, **_more):
        raise OSError("no space left on device")

    monkeypatch.setattr("rankscope_exporter.monitors.hangs.diagnosis.Diagnosis.take", fail)
    monkeypatch.setattr("rankscope_exporter.monitors.hangs.diagnosis.Diagnosis.publish", fail)
    parts, output = made(), []
    with attached(parts, console=True) as monitor:
        train(monitor, 3, **parts)
        eventually(lambda: output.append(capfd.readouterr().err) or "no sign of training for" in "".join(output))
        train(monitor, 3, **parts)
        eventually(lambda: output.append(capfd.readouterr().err) or "training continues after" in "".join(output))
