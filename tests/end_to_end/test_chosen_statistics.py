"""Statistics that a rank does not compute are null in the stored rows."""

from __future__ import annotations

import torch
from tests.end_to_end.stored_rows import tables_of
from tests.exporter.conftest import Reader, wait_until
from torch import nn

from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS
from rankscope_exporter import Monitor, MonitorConfig


def test_omitted_statistics_are_null_and_absent_tensors_have_no_row():
    net = nn.Linear(3, 2)
    net.bias.requires_grad_(False)  # its gradients are absent
    config = MonitorConfig(quantities=("gradients",), ops=["max", "zeros"], console=False, exit_wait_seconds=0)
    with Monitor(config).attach(net, torch.optim.SGD([net.weight], lr=0.1)) as monitor:
        assert monitor.address is not None
        read = Reader(monitor.address)
        net(torch.ones(2, 3)).sum().backward()
        monitor.end_step()
        wait_until(read.rows, 60)
        rows = tables_of(read)["tensor_stats"].to_pylist()

    assert {"weight"} == {row["tensor"] for row in rows}
    for row in rows:
        assert {"max", "zeros", "numel"} == {op for op in (*VALUE_OPS, *COUNT_OPS) if row[op] is not None}
        assert (2.0, 0, 6) == (row["max"], row["zeros"], row["numel"])
