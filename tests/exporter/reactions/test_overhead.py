"""The reported overhead equals the additional CPU time of a process with the monitor, with threads and pages."""

from __future__ import annotations

import json
import time

import pytest
from tests.exporter.parts import Training
from tests.programs import run_program

PROGRAM = """
import json, os, statistics, sys, time, urllib.request
reader, writer = os.pipe()
reading = os.fork() == 0  # before any thread is started: reading a page must not count
if reading:
    os.close(writer)
    for url in os.fdopen(reader):
        for path in ("/metrics", "/records?after=-1"):
            request = urllib.request.Request(url.strip() + path, headers={"Rankscope-Schema": "1"})
            try:
                urllib.request.urlopen(request, timeout=60).read()
            except OSError:
                pass
    os._exit(0)
os.close(reader)
pages = os.fdopen(writer, "w", buffering=1)
import torch
from torch import nn
from rankscope_exporter import Monitor, MonitorConfig

STEPS, PAIRS, PAGES = 40, 2, 5
inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
config = MonitorConfig(console=False, exit_wait_seconds=0, statistics="torch", hang_after_seconds=0)

def train(net, optimizer, monitor, steps):
    for step in range(steps):
        loss = net(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss, tokens=8)
        monitor.batch([step])
        if monitor.address and step % (STEPS // PAGES) == 0:
            print(monitor.address, file=pages)

def seconds(*, attached):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(12)])
    optimizer = torch.optim.Adam(net.parameters())
    monitor = Monitor(config)
    if attached:
        monitor.attach(net, optimizer)
    train(net, optimizer, monitor, 5)  # what is made once is made here
    if attached:
        monitor._session.publisher.catch_up(60)
        time.sleep(0.2)
    before, own = time.process_time(), sum(monitor.overhead_seconds().values())
    train(net, optimizer, monitor, STEPS)
    if attached:
        monitor.end_step()
        monitor._session.publisher.catch_up(60)
        time.sleep(0.2)  # for the last page
    result = time.process_time() - before, sum(monitor.overhead_seconds().values()) - own
    by_thread = monitor.overhead_seconds()
    monitor.detach()
    return *result, by_thread

seconds(attached=True)  # the first of all imports and makes more
ratios = []
for _ in range(PAIRS):
    bare, _, _ = seconds(attached=False)
    whole, own, by_thread = seconds(attached=True)
    ratios.append(own / (whole - bare))
share = (whole - bare) / whole
print(json.dumps({"ratio": statistics.mean(ratios), "ratios": ratios, "share": share, "by": by_thread}))
"""


@pytest.mark.thorough
def test_reported_overhead_equals_extra_cpu_time_within_30_percent():
    """Compares CPU time, not wall time. Most work of the process is that of the monitor, so the noise is small."""
    done = run_program(PROGRAM, seconds=300)
    assert 0 == done.returncode, done.stderr
    paired = json.loads(done.stdout)

    assert paired["share"] > 0.4, paired
    assert 0.7 <= paired["ratio"] <= 1.3, paired
    assert all(paired["by"][name] > 0 for name in ("attach", "hooks", "publisher", "http")), paired


def test_calls_of_the_script_count_as_overhead():
    """A call of log() that takes 50 ms."""
    with Training() as training:
        before = training.monitor.overhead_seconds()["hooks"]
        training.monitor.log(loss=_Slow())
        spent = training.monitor.overhead_seconds()["hooks"] - before

    assert 0.05 <= spent


class _Slow:
    def __float__(self) -> float:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        return 1.0


_MEASUREMENT = """
import time

import torch

from rankscope_exporter import Monitor
from rankscope_exporter.training.cpu_time import IntraOpThreads

torch.set_num_threads(2)
team, tensor = IntraOpThreads(), torch.ones(1 << 22)
team.find()
tensor.add(tensor)
assert 0.0 == team.seconds
own = time.thread_time()
team.on_measurement_begin()
for _ in range(20):
    tensor.add(tensor)
team.on_measurement_end()
own = time.thread_time() - own
assert 1 == len(team._clocks), team._clocks
assert 0.1 * own < team.seconds, (own, team.seconds)

net = torch.nn.Linear(2048, 2048)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
settings = {"quantities": ["parameters"], "statistics": "torch", "console": False, "exit_wait_seconds": 0}
with Monitor(settings).attach(net, optimizer) as monitor:
    net(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    assert 0.0 < monitor.overhead_seconds()["intra_op"]
"""


def test_torch_threads_count_only_during_measurements():
    """In a forked process with one import of torch: for a tensor, and in a training."""
    done = run_program(_MEASUREMENT)

    assert 0 == done.returncode, done.stderr


def test_stored_overhead_equals_the_metrics_page():
    """There is a row for each thread at intervals."""
    with Training() as training:
        training.train()
        training.publish()
        shown = training.monitor.overhead_seconds()
        rows = [s for record in training.records for s in record.scalars if s.name == "overhead_seconds"]
    stored = {row.labels["thread"]: row.value for row in rows}

    assert {"hooks", "publisher", "attach", "intra_op"} <= stored.keys() <= shown.keys()
    assert all(0 <= value <= shown[name] for name, value in stored.items())
    assert 0 == training.faults
