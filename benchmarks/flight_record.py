"""Cost of reading torch's flight record: with stacks, without stacks, longest pause of the training, and in total.

A group of one rank on gloo fills the record. The longest pause of another thread is measured by a thread that only
reads the clock; the share of a core is that of a monitor with default settings, over a training of short steps.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _rows import Row, print_rows

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.monitors.flight_recorder.poller import StepAssignment
from rankscope_exporter.monitors.flight_recorder.torch_api import (
    CPU,
    prepare_stacks,
    ranks_by_group,
    read_with_stacks,
    read_without_stacks,
    worker_server,
)

REPEATS = 7
TRAINING_SECONDS = 60.0
COLLECTIVES_PER_STEP = 20


def run() -> list[Row]:
    logging.getLogger("rankscope").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    net = torch.nn.Linear(2, 1)
    torch.optim.SGD(net.parameters(), lr=0.1).step()  # as in any training, brings in the compiler
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder, 'group')}", rank=0, world_size=1)
        rows = [*_readings(100), *_readings(2000), *_training()]
        dist.destroy_process_group()
    return rows


def _readings(entries: int) -> list[Row]:
    _reduce(entries if entries < 2000 else 2100)
    where = f"{entries:,} entries"
    began = time.thread_time()
    prepare_stacks()
    _rows_of_all()
    first = (time.thread_time() - began) * 1e3
    return [
        Row(f"with stacks, first time, {where}", first, "ms CPU", "the first of all imports a part of the compiler"),
        Row(f"with stacks, {where}", _least(_with_stacks), "ms CPU"),
        Row(f"without stacks, {where}", _least(_without_stacks), "ms CPU"),
        Row(f"rows of all, {where}", _least(_rows_of_all), "ms CPU", "the reading with stacks, and all rows of it"),
        Row(f"longest pause, with stacks, {where}", _pause(_with_stacks), "ms", "of another Python thread"),
        Row(f"longest pause, without, {where}", _pause(_without_stacks), "ms", "the same"),
        Row(
            f"longest pause, torch's function, {where}", _pause(_function), "ms", "the same, before its JSON is parsed"
        ),
        Row(f"longest pause, torch's handler, {where}", _pause(_handler), "ms", "the same"),
        Row(f"longest pause, no read, {where}", _pause(lambda: time.sleep(0.05)), "ms", "the same, for comparison"),
    ]


def _reduce(calls: int) -> None:
    tensor = torch.ones(4, 5)
    for _ in range(calls):
        dist.all_reduce(tensor)


def _with_stacks() -> Any:
    return read_with_stacks(_fail)


def _without_stacks() -> Any:
    return read_without_stacks(_fail)


def _rows_of_all() -> Any:
    return StepAssignment().take(_with_stacks(), ranks_by_group(_fail), is_last=True)


def _function() -> Any:
    return torch._C._distributed_c10d._dump_fr_trace_json(True, False)  # type: ignore[attr-defined]  # noqa: SLF001 - it has no public name


def _handler() -> Any:
    return worker_server().ask(CPU.handler, 60.0)


def _fail(_where: str, error: BaseException) -> None:
    raise error


def _least(call: Callable[[], Any]) -> float:
    """Return the least milliseconds of CPU time."""
    costs = []
    for _ in range(REPEATS):
        began = time.thread_time()
        call()
        costs.append(time.thread_time() - began)
    return min(costs) * 1e3


def _pause(call: Callable[[], Any]) -> float:
    """Return the median over repeats of the longest time for which a busy thread did not run, in milliseconds."""
    pauses = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    for _ in range(REPEATS):
        stopped, longest = threading.Event(), [0.0]
        watching = threading.Thread(target=_watch, args=(stopped, longest))
        watching.start()
        time.sleep(0.01)
        call()
        stopped.set()
        watching.join()
        pauses.append(longest[0] * 1e3)
    sys.setswitchinterval(interval)
    return sorted(pauses)[REPEATS // 2]


def _watch(stopped: threading.Event, longest: list[float]) -> None:
    before = time.perf_counter()
    while not stopped.is_set():
        now = time.perf_counter()
        longest[0] = max(longest[0], now - before)
        before = now


def _training() -> list[Row]:
    """Train for a while with a record that is full, and return what the thread took of it."""
    net = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    monitor = Monitor(MonitorConfig(quantities=(), console=False, exit_wait_seconds=0)).attach(net, optimizer)
    session = monitor._session  # noqa: SLF001 - a benchmark of its parts
    assert session is not None
    began, steps = time.monotonic(), 0
    while time.monotonic() - began < TRAINING_SECONDS:
        net(torch.ones(64, 64)).sum().backward()
        _reduce(COLLECTIVES_PER_STEP)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        steps += 1
    seconds = time.monotonic() - began
    cost, rows = (
        monitor.overhead_seconds()["collectives"],
        sum(calls for calls, _ in session.collectives.totals().values()),
    )
    monitor.detach()
    note = f"{steps} steps of {COLLECTIVES_PER_STEP} collectives in {seconds:.0f} s: {rows:,} rows"
    return [
        Row("the thread, default settings", cost * 1e3, "ms CPU", note),
        Row("the same", 100 * cost / seconds, "% of one core", "the default allows 0.1 on average"),
    ]


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
