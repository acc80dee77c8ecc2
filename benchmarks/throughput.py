"""Throughput and hardware: cost of TFLOP/s for a step, of finding 6 N, and of one look at the machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from _rows import Row, print_rows
from monitor_overhead import Model
from torch import nn

from rankscope_exporter.adapters import framework_of
from rankscope_exporter.monitors.hardware import ResourceObserver, machine_state
from rankscope_exporter.monitors.throughput import ALONE, Throughput, ThroughputConfig, six_n
from rankscope_exporter.records.record import Pending, StepRecord, timing

REPEATS = 2000


def run() -> list[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    resources = ResourceObserver(torch.device("cpu"), dict, lambda: 1)
    return [
        Row(
            "find 6 N for 12 layers",
            1e6 * seconds_of(lambda: six_n(framework_of(model), ALONE)),
            "us CPU",
            "once in a training",
        ),
        Row("a step, on the training thread", 1e6 * followed(model), "us CPU"),
        Row("a step, on the publisher's thread", 1e6 * published(model), "us CPU"),
        Row("resident memory, of a measured step", 1e6 * seconds_of(resources.of_process), "us CPU"),
        Row("one look at process and machine", 1e6 * seconds_of(machine_state), "us CPU", "every 5 s"),
    ]


def metered(model: nn.Module) -> tuple[Throughput, Callable[[], StepRecord]]:
    meter = Throughput(
        framework_of(model),
        ThroughputConfig(flops_per_token=1e6, peak_tflops=1.0),
        ALONE,
        device=torch.device("cpu"),
        report=print,
    )
    return meter, lambda: StepRecord(
        step=1, ts=0, pending=[Pending("tokens", 1024.0), *timing(0.1, [Pending("tokens", 1024.0)], "forward")]
    )


def followed(model: nn.Module) -> float:
    meter, record = metered(model)

    def step() -> None:
        made = record()
        meter.on_forward_begin()
        meter.on_step_timed(made, "forward", made.pending)

    return seconds_of(step) - seconds_of(record)


def published(model: nn.Module) -> float:
    meter, record = metered(model)
    made = record()
    meter.on_step_timed(made, "forward", made.pending)
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
