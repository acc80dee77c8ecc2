"""Throughput and hardware: counting FLOPs once, what a step pays for TFLOP/s then, and one look at the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import psutil
import torch
from _rows import Row, print_rows
from monitor_overhead import BATCH, CONTEXT, Model
from torch import nn

from rankscope_exporter import Monitor
from rankscope_exporter.drafts import Draft, timing
from rankscope_exporter.frameworks import framework_of
from rankscope_exporter.hardware.host import from_proc, from_psutil
from rankscope_exporter.hardware.memory import resident_bytes
from rankscope_exporter.logged import Pending
from rankscope_exporter.throughput import Throughput, ThroughputConfig
from rankscope_exporter.throughput.captured import Inputs
from rankscope_exporter.throughput.counting import count
from rankscope_exporter.throughput.parameters import ALONE

REPEATS = 2000


def run() -> list[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, ids = Model(), torch.randint(0, 256, (BATCH, CONTEXT))
    inputs = Inputs.of((ids,), {})
    took = [counting_seconds(model, inputs) for _ in range(3)]
    process = psutil.Process()
    host = (("psutil", lambda: from_psutil(psutil, process)), ("/proc", from_proc))
    return [
        Row("count the FLOPs of 12 layers", took[0], "s CPU", "the first time in a process"),
        Row("again", statistics.median(took[1:]), "s CPU"),
        Row("the step while it counts", longest_step(model, ids), "steps", "over the median of later ones"),
        Row("a step, on the training thread", 1e6 * followed(model, inputs), "us CPU"),
        Row("a step, on the publisher's thread", 1e6 * published(model, inputs), "us CPU"),
        Row("resident memory, of a measured step", 1e6 * seconds_of(resident_bytes), "us CPU"),
        *(Row(f"one look, by {name}", 1e6 * seconds_of(read), "us CPU", "every 5 s") for name, read in host),
    ]


def counting_seconds(model: nn.Module, inputs: Inputs) -> float:
    spent: list[float] = []
    count(model, inputs, spent=spent.append)
    return sum(spent)


def longest_step(model: nn.Module, ids: torch.Tensor) -> float:
    """Return how long the longest step took while FLOPs were counted, over the median of later ones."""
    optimizer = torch.optim.AdamW(model.parameters())
    seconds = []
    config = {"console": False, "exit_wait_seconds": 0, "quantities": ["gradients"], "every": 1000}
    with Monitor(config).attach(model, optimizer):
        for _ in range(12):
            began = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
    return max(seconds[1:5]) / statistics.median(seconds[5:])


def metered(model: nn.Module, inputs: Inputs) -> tuple[Throughput, Callable[[], Draft]]:
    meter = Throughput(
        framework_of(model),
        ThroughputConfig(flops_per_token=1e6, peak_tflops=1.0),
        ALONE,
        device=torch.device("cpu"),
        tell=print,
    )
    meter._inputs = inputs  # noqa: SLF001 - as after the first forward
    return meter, lambda: Draft(1, 0, pending=[Pending("tokens", 1024.0), *timing(0.1, {"tokens": 1024.0})])


def followed(model: nn.Module, inputs: Inputs) -> float:
    meter, draft = metered(model, inputs)

    def step() -> None:
        made = draft()
        meter.forward_begins()
        meter.step_ends(made)
        meter.step_timed(made, "forward")

    return seconds_of(step) - seconds_of(draft)


def published(model: nn.Module, inputs: Inputs) -> float:
    meter, draft = metered(model, inputs)
    made = draft()
    meter.step_ends(made)
    meter.step_timed(made, "forward")
    return seconds_of(made.later[0])


def seconds_of(function: Callable[[], object]) -> float:
    """Return the CPU seconds of one call, the best of five series."""
    series = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(REPEATS // 10):
            function()
        series.append((time.thread_time() - began) / (REPEATS // 10))
    return min(series)


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
