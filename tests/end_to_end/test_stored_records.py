"""Rows of the store from records of a real monitor: calls of collectives, omitted statistics, hardware and speed."""

import re
from pathlib import Path

import duckdb
import pytest
import torch
import torch.distributed as dist
from tests.end_to_end.stored_rows import tables_of
from tests.exporter.conftest import Reader, wait_until
from tests.exporter.monitors.hardware.recorded_nvml import RecordedNvml
from torch import nn

from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS
from rankscope_exporter import Monitor, MonitorConfig, count_flops
from rankscope_exporter.monitors import hardware
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.connection import connect

DOCS = Path(__file__).parents[2] / "docs"


def tables_of_a_step(net, in_step=lambda: None, **settings):
    """Return the rows that a service creates from the records of a monitored step, in which `in_step` is called."""
    optimizer = torch.optim.SGD([one for one in net.parameters() if one.requires_grad], lr=0.1)
    with Monitor(MonitorConfig(console=False, exit_wait_seconds=0, **settings)).attach(net, optimizer) as monitor:
        read = Reader(monitor.address)
        net(torch.ones(2, 3)).sum().backward()
        in_step()
        monitor.end_step()
        wait_until(read.rows, 60)
        return tables_of(read)


def test_omitted_statistics_are_null_and_absent_tensors_have_no_row():
    """Statistics that a rank does not compute are null in the stored rows."""
    net = nn.Linear(3, 2)
    net.bias.requires_grad_(False)  # its gradients are absent
    rows = tables_of_a_step(net, quantities=("gradients",), ops=["max", "zeros"])["tensor_stats"].to_pylist()

    assert {"weight"} == {row["tensor"] for row in rows}
    for row in rows:
        assert {"max", "zeros", "numel"} == {op for op in (*VALUE_OPS, *COUNT_OPS) if row[op] is not None}
        assert (2.0, 0, 6) == (row["max"], row["zeros"], row["numel"])


def reduced_and_gathered():
    for number in (1.0, 2.0):
        dist.all_reduce(torch.full((3,), number))
    dist.all_gather([torch.zeros(4)], torch.tensor([1.0, torch.nan, 3.0, 4.0]))


def test_calls_are_stored_with_source_line_number_and_position(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        tables = tables_of_a_step(nn.Linear(3, 2), reduced_and_gathered, quantities=("collectives",))
    finally:
        dist.destroy_process_group()
    with Store.open(tmp_path / "store", create=True).claim(owner="test") as writer:
        writer.append(Batch(tables=tables, watermarks={"i": 100}))
    with connect(tmp_path / "store") as connection:
        rows = connection.query(
            "SELECT kind, regexp_replace(tensor, '[0-9]+', 'n') AS tensor, call_seq, \"index\", max, nans "
            "FROM tensor_stats ORDER BY tensor DESC, call_seq NULLS FIRST"
        ).to_pylist()
        fired = connection.query("SELECT rule, kind FROM events WHERE type = 'anomaly'").to_pylist()

    place = "tests/end_to_end/test_stored_records.py[n]"
    assert [
        ("comm_out", f"all_reduce@{place}", None, None, 1.0, 0),
        ("comm_out", f"all_reduce@{place}", 1, None, 2.0, 0),
        ("comm_out", f"all_gather@{place}", None, 0, 4.0, 1),
    ] == [tuple(row.values()) for row in rows]
    assert [{"rule": "AnomalyNan", "kind": "comm_out"}] == fired


def query(page):
    return re.search(r"```sql\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)[1]


def test_gpu_clocks_join_steps_by_time_and_slow_ranks_are_found(monkeypatch):
    double = RecordedNvml()
    monkeypatch.setattr(hardware, "uuid_of", lambda _device: "bbbbbbbb-0000-1111-2222-333333333333")
    monkeypatch.setattr(hardware, "load_nvml", lambda: double)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {
        "console": False,
        "exit_wait_seconds": 0,
        "hardware": {"every_seconds": 0.01},
        "throughput": {"peak_tflops": 1e-6, "flops_per_sample": count_flops(model, torch.ones(1, 8))},
    }
    with Monitor(config).attach(model, optimizer) as monitor:
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
