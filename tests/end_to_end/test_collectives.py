"""Calls of collectives in the store: source line, number within the step, and position."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tests.end_to_end.stored_rows import tables_of
from tests.exporter.conftest import Reader, wait_until

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.connection import connect


def reduced_and_gathered():
    for number in (1.0, 2.0):
        dist.all_reduce(torch.full((3,), number))
    dist.all_gather([torch.zeros(4)], torch.tensor([1.0, torch.nan, 3.0, 4.0]))


def test_calls_are_stored_with_source_line_number_and_position(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        tables = published()
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

    place = "tests/end_to_end/test_collectives.py[n]"
    assert [
        ("comm_out", f"all_reduce@{place}", None, None, 1.0, 0),
        ("comm_out", f"all_reduce@{place}", 1, None, 2.0, 0),
        ("comm_out", f"all_gather@{place}", None, 0, 4.0, 1),
    ] == [tuple(row.values()) for row in rows]
    assert [{"rule": "AnomalyNan", "kind": "comm_out"}] == fired


def published():
    """Return the rows that a service creates from the records of a monitored step."""
    net = torch.nn.Linear(3, 2)
    config = MonitorConfig(quantities=("collectives",), console=False, exit_wait_seconds=0)
    with Monitor(config).attach(net, torch.optim.SGD(net.parameters(), lr=0.1)) as monitor:
        assert monitor.address is not None
        read = Reader(monitor.address)
        net(torch.ones(2, 3)).sum().backward()
        reduced_and_gathered()
        monitor.end_step()
        wait_until(read.rows, 60)
        return tables_of(read)
