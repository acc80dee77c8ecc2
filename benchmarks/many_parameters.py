"""12,000 parameters of 3 elements: seconds of attach, of the first sampled step and of later steps.

Each configuration runs in a process of its own, and the processes run one after the other in each round. The last rows
are one pass over the gradients, and the pass that looks for clipping without a new tensor version.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

import torch
from _rows import Row, print_rows
from torch import nn

from rankscope_exporter.statistics import MeasureGroup, StatisticsTable, warm_up

PARAMETERS = 12_000
ROUNDS = 3
STEPS = 12
WARM_UP_STEPS = 8  # the compiled kernel is ready after them


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(PARAMETERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.stack(list(self.small)) * x).square().mean()


def train(*, monitored: bool) -> dict[str, float]:
    """Return the seconds of attach, of the first step, and the median of the steps after the warm-up."""
    torch.set_num_threads(1)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    began = time.perf_counter()
    if monitored:
        from rankscope_exporter import Monitor

        Monitor({"console": False, "exit_wait_seconds": 0.0}).attach(model, optimizer)
    attach, steps = time.perf_counter() - began, []
    for _ in range(STEPS):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(torch.randn(3)).backward()
        optimizer.step()
        steps.append(time.perf_counter() - began)
        time.sleep(1.0)  # the publisher and the compilation of the kernel have the time of a larger model
    return {"attach": attach, "first": steps[0], "later": statistics.median(steps[WARM_UP_STEPS:])}


def run() -> list[Row]:
    found: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    for _ in range(ROUNDS):
        for name, results in found.items():
            command = [sys.executable, __file__, name]
            results.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    median = {name: {key: statistics.median(r[key] for r in of) for key in of[0]} for name, of in found.items()}
    begun = [on["attach"] + on["first"] - off["first"] for on, off in zip(found["on"], found["off"], strict=True)]
    ratios = [on["later"] / off["later"] for on, off in zip(found["on"], found["off"], strict=True)]
    return [
        Row("first step without the monitor", median["off"]["first"], "s", ""),
        Row("attach", median["on"]["attach"], "s", ""),
        Row("first sampled step", median["on"]["first"], "s", ""),
        Row("attach and first step, more than without", statistics.median(begun), "s", f"{ROUNDS} rounds"),
        Row("later step without the monitor", median["off"]["later"] * 1e3, "ms", ""),
        Row("later step, default configuration", median["on"]["later"] * 1e3, "ms", "every step is sampled"),
        Row("paired ratio of later steps", statistics.median(ratios), "x", f"{ROUNDS} rounds"),
        *_clipping(),
    ]


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
