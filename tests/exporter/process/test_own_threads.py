"""Threads of the monitor: each that works until the training ends is started again after an error, which is counted."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from rankscope_exporter import Monitor
from rankscope_exporter.process import threads
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.serving.config import ServeConfig

RUN = "threads"
LONG = ("hardware", "http", "node", "publisher", "registration", "spool", "spool-writer", "switch", "watchdog")
"""Threads that work until the training ends."""


def test_each_thread_raises_once_and_all_steps_are_published(
    quiet, reader, eventually, monkeypatch, tmp_path, free_port
) -> None:
    monkeypatch.setenv("RANKSCOPE_SPOOL_DIR", str(tmp_path))
    serve = ServeConfig(node_page=True, ingest_url=f"http://127.0.0.1:{free_port}")
    config = replace(quiet, run=RUN, serve=serve, switch_file=str(tmp_path / "switch"), switch_poll_seconds=0.05)
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
    with Monitor(config).attach(net, optimizer) as monitor:
        read = reader(monitor)
        for number in range(3):
            net(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=float(number))
            monitor.end_step()

        assert [(1, 0.0), (2, 1.0), (3, 2.0)] == eventually(lambda: (found := read.scalars("loss"))[2:] and found)
        eventually(lambda: {f"rankscope-{name}" for name in LONG} <= set(raised))
        eventually(lambda: f'faults_total{{rank="0",run="{RUN}"}} {len(raised)}.0\n' in read.get("/metrics").decode())
