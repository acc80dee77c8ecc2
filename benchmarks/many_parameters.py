"""12,000 parameters of 3 elements: seconds of attach, of the first sampled step and of later steps.

Each round is a process, which trains three models one after the other: without the monitor, with it, and without it
again. The value without the monitor is the mean of the two, because the speed of a shared machine changes within
seconds. CPU time includes all threads of the process. The last rows are one pass over the gradients, and the pass that
looks for clipping without a new tensor version.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from _rows import Row, print_rows
from torch import nn

from rankscope_exporter import Monitor
from rankscope_exporter.measure.kernels.measure_group import MeasureGroup
from rankscope_exporter.measure.kernels.statistics_table import StatisticsTable

PARAMETERS = 12_000
ROUNDS = 5
MOST_SECONDS = 150.0  # no round begins that would end later if it took as long as the longest one
WARM_UP_STEPS = 2  # the publisher encodes the plan during the first of them
STEPS = 3

Seconds = tuple[float, float]
"""Wall time and CPU time."""


class Small(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.small = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(parameters)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.stack(list(self.small)) * x).square().mean()


def train(parameters: int, monitor: Monitor | None = None) -> tuple[Seconds, Seconds, Seconds]:
    """Return the times of attach, of the first step, and of the later steps (their median)."""
    model = Small(parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gc.collect()  # of the model before

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(3)).backward()
        optimizer.step()

    attach = (0.0, 0.0) if monitor is None else _seconds(lambda: monitor.attach(model, optimizer))
    first = _seconds(step)
    for _ in range(WARM_UP_STEPS):
        step()
    later = [_seconds(step) for _ in range(STEPS)]
    wall, processor = (statistics.median(column) for column in zip(*later, strict=True))
    return attach, first, (wall, processor)


def train_three() -> dict[str, list[Seconds]]:
    """Return the times of attach, first and later steps without the monitor (means) and with it."""
    torch.set_num_threads(1)
    train(10)  # the first step of a process imports modules of torch
    before = train(PARAMETERS)
    monitor = Monitor({"console": False, "exit_wait_seconds": 0.0})
    monitored = train(PARAMETERS, monitor)
    monitor.detach()
    after = train(PARAMETERS)
    without = [((one[0] + other[0]) / 2, (one[1] + other[1]) / 2) for one, other in zip(before, after, strict=True)]
    return {"off": without, "on": list(monitored)}


def _seconds(function: Callable[[], object]) -> Seconds:
    """Call `function`, and return its wall time and the CPU time of the process during the call."""
    wall, processor = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - processor


def run() -> list[Row]:
    found: list[dict[str, list[Seconds]]] = []
    began = ended = time.monotonic()
    longest = 0.0
    for number in range(ROUNDS):
        if ended - began + longest > MOST_SECONDS:
            break
        command = [sys.executable, __file__, "round"]
        found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(f"round {number + 1} of {ROUNDS}: {found[-1]}", file=sys.stderr, flush=True)
        before, ended = ended, time.monotonic()
        longest = max(longest, ended - before)
    rows = [Row("load average of the last 5 minutes", os.getloadavg()[1], "", f"{ended - began:.0f} s of measurement")]
    for place, clock in enumerate(("wall", "CPU")):
        attach = [of["on"][0][place] for of in found]
        first, later = ([(of["off"][part][place], of["on"][part][place]) for of in found] for part in (1, 2))
        more = [begun + on - off for begun, (off, on) in zip(attach, first, strict=True)]
        rows += [
            _row(f"first step without the monitor, {clock}", [off for off, _ in first], "s"),
            _row(f"attach, {clock}", attach, "s"),
            _row(f"first sampled step, {clock}", [on for _, on in first], "s"),
            _row(f"attach and first step, more than without, {clock}", more, "s"),
            _row(f"later step without the monitor, {clock}", [off for off, _ in later], "s"),
            _row(f"later step, default configuration, {clock}", [on for _, on in later], "s"),
            _row(f"paired ratio of later steps, {clock}", [on / off for off, on in later], "x"),
        ]
    return [*rows, *_clipping()]


def _row(name: str, values: list[float], unit: str) -> Row:
    return Row(
        name, statistics.median(values), unit, f"{min(values):.2f} to {max(values):.2f} in {len(values)} round(s)"
    )


def _clipping() -> list[Row]:
    gradients = [torch.randn(3) for _ in range(PARAMETERS)]
    table = StatisticsTable(2 * PARAMETERS, torch.device("cpu"))
    reduced, clipped = range(PARAMETERS), range(PARAMETERS, 2 * PARAMETERS)
    groups = {rows: MeasureGroup(rows) for rows in (reduced, clipped)}
    seconds: dict[range, list[float]] = {reduced: [], clipped: []}
    for _ in range(21):
        for rows, group in groups.items():
            began = time.thread_time()
            group.measure(gradients, table)
            if rows is clipped:
                table.forget_equal(clipped, reduced)
            seconds[rows].append(time.thread_time() - began)
    taken = [statistics.median(seconds[rows]) * 1e3 for rows in (reduced, clipped)]
    return [
        Row("one pass over the gradients", taken[0], "ms", "CPU time, compiled kernel"),
        Row("the pass that looks for clipping", taken[1], "ms", f"{taken[1] / taken[0]:.2f} x one pass"),
    ]


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(train_three()))
        sys.stdout.flush()
        os._exit(0)
    print_rows((__doc__ or "").splitlines()[0], run())
