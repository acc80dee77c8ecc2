"""Throughput and GPU metrics of a rank are stored and can be joined by time."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import pytest
import torch
from tests.end_to_end.stored_rows import tables_of
from tests.exporter.conftest import Reader, wait_until
from tests.exporter.monitors.hardware.recorded_nvml import RecordedNvml
from torch import nn

from rankscope_exporter import Monitor, count_flops
from rankscope_exporter.monitors.hardware import poller
from rankscope_exporter.monitors.hardware.poller import HardwarePoller

DOCS = Path(__file__).parents[2] / "docs"


def query(page):
    found = re.search(r"```sql\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def test_gpu_clocks_join_steps_by_time_and_slow_ranks_are_found(monkeypatch):
    double = RecordedNvml()
    monkeypatch.setattr(poller, "uuid_of", lambda _device: "bbbbbbbb-0000-1111-2222-333333333333")
    monkeypatch.setattr(HardwarePoller.__init__, "__kwdefaults__", {"nvml": lambda: double})
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {
        "console": False,
        "exit_wait_seconds": 0,
        "hardware": {"every_seconds": 0.01},
        "throughput": {"peak_tflops": 1e-6, "flops_per_sample": count_flops(model, torch.ones(1, 8))},
    }
    with Monitor(config).attach(model, optimizer) as monitor:
        assert monitor.address is not None
        read = Reader(monitor.address)
        wait_until(lambda: len(read.scalars("gpu_clock_hertz")) >= 4)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(16, 8)).sum().backward()
            optimizer.step()
            monitor.log(samples=16)
        monitor.end_step()
        wait_until(lambda: len(read.scalars("mfu")) == 2)
        scalars = tables_of(read, "my-run")["scalars"]  # noqa: F841 - read by name in the queries

    steps = duckdb.connect().sql(query("hardware.md")).fetchall()
    slowest = duckdb.connect().sql(query("throughput.md")).fetchall()
    rows = duckdb.connect().sql(
        "select name, value, step from scalars where name in ('tflops_per_gpu', 'step_seconds', 'mfu')"
    )
    by_step = {}
    for name, value, step in rows.fetchall():
        by_step.setdefault(step, {})[name] = value

    assert [(0, 1, 1.2), (0, 2, 1.2)] == sorted(steps)
    assert {1, 2} == by_step.keys()
    for found in by_step.values():
        assert 2 * 2 * 16 * 8 * 4 == pytest.approx(found["tflops_per_gpu"] * found["step_seconds"] * 1e12)
        assert found["tflops_per_gpu"] / 1e-6 == pytest.approx(found["mfu"])
    assert [0] == [rank for rank, _ in slowest]
