"""12,000 parameters of 3 elements: seconds of attach, of the first sampled step and of later steps.

Each configuration runs in a process of its own, and the processes run one after the other in each round, in alternating
order. CPU time includes all threads of the process, so that it depends less on other processes than wall time. It still
depends on them, because they share caches and cores: the ratio to the first step without the monitor does so less. The
last rows are one pass over the gradients, and the pass that looks for clipping without a new tensor version.
"""

from __future__ import annotations

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

from rankscope_exporter.statistics import MeasureGroup, StatisticsTable, warm_up

PARAMETERS = 12_000
ROUNDS = 5
MOST_SECONDS = 150.0  # no round begins that would end later if it took as long as the longest one
WARM_UP_STEPS = 2  # the publisher encodes the plan during the first of them
STEPS = 3


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(PARAMETERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.stack(list(self.small)) * x).square().mean()


def train(*, monitored: bool) -> dict[str, float]:
    """Return wall and CPU seconds of attach, of the first step, and of the later steps (their median)."""
    torch.set_num_threads(1)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def attach() -> None:
        from rankscope_exporter import Monitor

        Monitor({"console": False, "exit_wait_seconds": 0.0}).attach(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(3)).backward()
        optimizer.step()

    found = dict.fromkeys(("attach", "attach CPU"), 0.0)
    if monitored:
        found["attach"], found["attach CPU"] = _seconds(attach)
    found["first"], found["first CPU"] = _seconds(step)
    thread = warm_up() if monitored else None
    if thread is not None:
        thread.join()
    for _ in range(WARM_UP_STEPS):
        step()
    later = [_seconds(step) for _ in range(STEPS)]
    found["later"], found["later CPU"] = (statistics.median(column) for column in zip(*later, strict=True))
    return found


def _seconds(function: Callable[[], None]) -> tuple[float, float]:
    """Call `function`, and return its wall time and the CPU time of the process during the call."""
    wall, processor = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - processor


def run() -> list[Row]:
    found: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    began = ended = time.monotonic()
    longest = 0.0
    for round_number in range(ROUNDS):
        if ended - began + longest > MOST_SECONDS:
            break
        for name in sorted(found, reverse=round_number % 2 == 1):
            command = [sys.executable, __file__, name]
            found[name].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            print(
                f"round {round_number + 1} of {ROUNDS}, monitor {name}: {found[name][-1]}", file=sys.stderr, flush=True
            )
        before, ended = ended, time.monotonic()
        longest = max(longest, ended - before)
    rows = [Row("load average of the last 5 minutes", os.getloadavg()[1], "", f"{ended - began:.0f} s of measurement")]
    for clock, suffix in (("wall", ""), ("CPU", " CPU")):
        keys = [f"{name}{suffix}" for name in ("attach", "first", "later")]
        attach, first, later = ([(off[key], on[key]) for off, on in zip(*found.values(), strict=True)] for key in keys)
        more = [on + begun[1] - off for (off, on), begun in zip(first, attach, strict=True)]
        share = [seconds / off for seconds, (off, _) in zip(more, first, strict=True)]
        rows += [
            _row(f"first step without the monitor, {clock}", [off for off, _ in first], "s"),
            _row(f"attach, {clock}", [on for _, on in attach], "s"),
            _row(f"first sampled step, {clock}", [on for _, on in first], "s"),
            _row(f"attach and first step, more than without, {clock}", more, "s"),
            _row(f"the same, divided by the first step without, {clock}", share, "x"),
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
    thread = warm_up()
    if thread is not None:
        thread.join()
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
        print(json.dumps(train(monitored=sys.argv[1] == "on")))
        sys.stdout.flush()
        os._exit(0)
    print_rows((__doc__ or "").splitlines()[0], run())
