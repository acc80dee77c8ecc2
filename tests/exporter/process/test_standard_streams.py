"""Training processes that start with closed standard streams, as a daemon or a timer starts them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rankscope.base.spools import store_spools
from rankscope_storage.connection import connect

CLOSED = "import os, sys\nos.closerange(0, 3)\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"

TRAINING = """
import contextlib, os, sys
import torch
from torch import nn
from rankscope_exporter import Monitor
torch.manual_seed(0)
net = nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
monitor = Monitor({"statistics": "torch"})
if sys.argv[1] == "monitored":
    monitor.attach(net, optimizer)
for step in range(5):
    loss = net(torch.ones(3, 4)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.log(loss=loss)
    print("step", step)
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"output of native code")
are_null = {}
for descriptor in range(3):
    with contextlib.suppress(OSError):
        are_null[descriptor] = os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))
torch.save({"weights": net.state_dict(), "are_null": are_null, "address": monitor.address}, sys.argv[2])
monitor.detach()
sys.exit(7)
"""


@pytest.mark.thorough
def test_output_with_closed_streams_is_in_no_file_of_the_monitor(tmp_path):
    import torch

    environment = {**os.environ, "RANKSCOPE_RUN": "closed", "RANKSCOPE_SPOOL_DIR": str(tmp_path / "records")}
    saved = {}
    for name in ("alone", "monitored"):
        command = [sys.executable, "-c", CLOSED, "-c", TRAINING, name, str(tmp_path / name)]
        ended = subprocess.run(command, cwd=tmp_path, env=environment, timeout=120, check=False)
        saved[name] = torch.load(tmp_path / name)
        assert 7 == ended.returncode
    spools, _ = store_spools(tmp_path / "records", tmp_path / "history", shard="0/1", with_running=False)
    with connect(tmp_path / "history") as connection:
        losses = connection.sql("SELECT count(*) FROM scalars WHERE name = 'loss'").fetchall()

    assert [6] == [spool.records for spool in spools]  # five steps and the exit
    assert [(5,)] == losses
    assert saved["monitored"]["address"]
    assert dict.fromkeys(range(3), True) == saved["monitored"]["are_null"]
    for name, weight in saved["alone"]["weights"].items():
        assert torch.equal(weight, saved["monitored"]["weights"][name])
