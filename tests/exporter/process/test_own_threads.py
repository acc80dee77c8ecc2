"""Threads of the monitor: each that works until the training ends is started again after an error, which is counted."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankscope_exporter
from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.process import threads
from rankscope_exporter.process.threads import OwnThread

LONG = {
    *("collectives", "hardware", "http", "node", "publisher", "registration", "spool", "spool-writer", "stop"),
    *("stop-watch", "switch", "watchdog"),
    "",  # BackgroundWorker, whose name is that of its owner
}
"""Threads that work until the training ends."""

SHORT = {"end", "flight-record", "http-client", "report", "warm-up"}
"""Threads of one piece of work, which reports its own errors or is repeated by another thread."""


def starts() -> Iterator[tuple[str, bool]]:
    """Yield the name of each thread in the source of the exporter, and whether it is started again after an error."""
    for path in Path(rankscope_exporter.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "OwnThread(" in text else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "OwnThread":
                given = {one.arg: one.value for one in node.keywords}
                name = given["name"]
                first = name if isinstance(name, ast.Constant) else name.values[0]  # type: ignore[attr-defined]
                yield str(first.value).removeprefix("rankscope-"), "on_fault" in given


def test_every_thread_of_the_monitor_is_listed_here() -> None:
    found = dict(starts())

    assert LONG | SHORT == set(found)
    assert {name for name, is_again in found.items() if is_again} == LONG


def test_each_thread_raises_once_and_all_steps_are_published(
    quiet: MonitorConfig,
    reader: Callable[[Monitor], Any],
    eventually: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[str] = []
    start = OwnThread.start

    def failing(thread: OwnThread) -> None:
        work = thread._work
        if thread._on_fault is not None and not thread.name.startswith("rankscope-stop"):

            def once() -> None:
                if thread.name not in raised:
                    raised.append(thread.name)
                    raise RuntimeError(f"injected into {thread.name}")
                work()

            thread._work = once  # type: ignore[assignment]
        start(thread)

    monkeypatch.setattr(OwnThread, "start", failing)
    monkeypatch.setattr(threads, "RESTART_SECONDS", 0.05)
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        for number in range(3):
            net(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=float(number))
            monitor.end_step()

        assert [(1, 0.0), (2, 1.0), (3, 2.0)] == eventually(lambda: (found := read.scalars("loss"))[2:] and found)
        page = read.get("/metrics").decode()

    assert {f"rankscope-{name}" for name in ("hardware", "http", "publisher", "watchdog")} <= set(raised)
    (faults,) = (line.split()[-1] for line in page.splitlines() if line.startswith("rankscope_exporter_faults_total{"))
    assert len(raised) == float(faults)
