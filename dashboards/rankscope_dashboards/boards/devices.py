"""The Grafana board "Speed and devices": model FLOPs, utilisation and errors of GPUs, and load of the hosts."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import dashboard as builders

from rankscope_contract.metrics import catalogue, hardware
from rankscope_contract.metrics.spec import MetricSpec
from rankscope_dashboards.boards.elements.board import Section, SizedPanel, make_board
from rankscope_dashboards.boards.elements.panels import (
    PanelBuilder,
    PanelText,
    Query,
    count_text,
    fraction_text,
    over_ranks,
    table_panel,
    time_series_panel,
)
from rankscope_dashboards.boards.elements.selectors import RANKS, increase, ranks, rate

MAX_LINES: Final = 20
"""Largest number of lines in a panel that has one line per rank."""


def board() -> builders.Dashboard:
    """Return the board "Speed and devices" without its uid, which `boards()` sets."""
    description = "Compute throughput, GPUs and hosts of the ranks of training runs."
    sections = (
        Section(
            "Compute throughput", (SizedPanel(_mfu(), 8, 8), SizedPanel(_tflops(), 8, 8), SizedPanel(_tokens(), 8, 8))
        ),
        Section(
            "GPUs",
            (
                SizedPanel(_utilization(), 8, 8),
                SizedPanel(_power(), 8, 8),
                SizedPanel(_temperature(), 8, 8),
                SizedPanel(_clock(), 8, 8),
                SizedPanel(_throttled(), 8, 8),
                SizedPanel(_gpu_memory(), 8, 8),
            ),
        ),
        Section("GPU errors", (SizedPanel(_errors(), 12, 8), SizedPanel(_error_counts(), 12, 8))),
        Section("PyTorch memory", (SizedPanel(_allocated(), 12, 8), SizedPanel(_retries(), 12, 8))),
        Section(
            "Hosts", (SizedPanel(_host_cpu(), 8, 8), SizedPanel(_host_memory(), 8, 8), SizedPanel(_switches(), 8, 8))
        ),
    )
    return make_board("Speed and devices", description, sections)


def _mfu() -> PanelBuilder:
    text = fraction_text(
        "MFU",
        "Model FLOPs utilisation: FLOPs of forward and backward pass, without recomputation, relative to the peak of "
        "the devices. Mean of the ranks, and the lowest rank. `method` shows how the FLOPs were determined. Compare a "
        "run with itself: if the level falls and does not recover, check for a slow GPU, a slow link and a slow data "
        "loader.",
        maximum=None,
    )
    return time_series_panel(text, *_by_method(hardware.MFU))


def _tflops() -> PanelBuilder:
    text = PanelText(
        title="TFLOP/s per GPU",
        description="Model FLOPs per second on one device, in TFLOP/s. Also available if the peak of the device is "
        "unknown. Ranks wait for each other, so all slow down together. In pipeline parallelism each rank counts only "
        "the FLOPs of its own stage.",
        unit="suffix: TFLOP/s",
        minimum=0,
    )
    return time_series_panel(text, *_by_method(hardware.TFLOPS_PER_GPU))


def _tokens() -> PanelBuilder:
    text = PanelText(
        title="Tokens per second and rank",
        description="Tokens that a rank trains on per second, mean and lowest rank. If several ranks compute one "
        "copy of the model, each of them counts the same tokens. Empty if training logs no tokens.",
        unit="suffix: tok/s",
        minimum=0,
    )
    return time_series_panel(text, *over_ranks(rate(catalogue.TOKENS), "avg", "min"))


def _utilization() -> PanelBuilder:
    text = fraction_text(
        "GPU utilisation",
        "Fraction of the time in which any kernel ran. At 100 % a kernel can still be slow, or wait for another rank. "
        "Low on all ranks: check the data loader and the host CPU. Low on one rank: check its host.",
    )
    return time_series_panel(text, *over_ranks(f"({hardware.GPU_UTILIZATION.name}{RANKS})", "avg", "min"))


def _power() -> PanelBuilder:
    text = PanelText(
        title="GPU power",
        description="Power draw, mean and lowest GPU, and the lowest power limit. This is the best indicator of real "
        "work: a GPU that waits in a collective shows full utilisation at half the power.",
        unit="watt",
        minimum=0,
    )
    limit = Query(f"min by (run) ({hardware.GPU_POWER_LIMIT_WATTS.name}{RANKS})", "{{run}} limit")
    power = f"({hardware.GPU_POWER_WATTS.name}{RANKS})"
    return time_series_panel(text, *over_ranks(power, "avg", "min"), limit)


def _temperature() -> PanelBuilder:
    text = PanelText(
        title="GPU temperature",
        description="Temperature of the hottest GPU, by sensor. Near its limit a GPU reduces its clocks. If one GPU "
        "is hotter than its neighbours, check its fan, heat sink and position in the rack.",
        unit="celsius",
    )
    query = f"max by (run, sensor) ({hardware.GPU_TEMPERATURE_CELSIUS.name}{RANKS})"
    return time_series_panel(text, Query(query, "{{run}} {{sensor}}"))


def _clock() -> PanelBuilder:
    text = fraction_text(
        "SM clock",
        "SM clock as a fraction of its maximum, mean and lowest rank. One rank below the others delays all ranks at "
        "every collective. At full load and the power limit, many GPUs are some percent below 1.",
    )
    clock, limit = (
        metric.name + ranks('clock="sm"') for metric in (hardware.GPU_CLOCK_HERTZ, hardware.GPU_CLOCK_LIMIT_HERTZ)
    )
    return time_series_panel(text, *over_ranks(f"({clock} / {limit})", "avg", "min"))


def _throttled() -> PanelBuilder:
    text = count_text(
        "Throttled GPUs",
        "Number of GPUs with reduced clocks, by reason. `sw_power_cap` under full load and `idle` are normal. "
        "`hw_slowdown`, `hw_thermal`, `hw_power_brake` and `sw_thermal` indicate a problem with heat or power.",
        minimum=0,
    )
    # If Prometheus scrapes `/node/metrics` of each host, live and stored samples of a GPU are two series. max() merges
    # them.
    gpus = f"max by (run, rank, gpu, reason) ({hardware.GPU_THROTTLED.name}{RANKS})"
    query = f"sum by (run, reason) ({gpus}) > 0"
    return time_series_panel(text, Query(query, "{{run}} {{reason}}"))


def _gpu_memory() -> PanelBuilder:
    text = fraction_text(
        "GPU memory",
        "Fraction of the device memory that all processes use, mean and highest rank: memory reserved by PyTorch, the "
        "CUDA context, NCCL buffers, and memory of other processes.",
    )
    used, total = hardware.GPU_MEMORY_USED_BYTES.name, hardware.GPU_MEMORY_TOTAL_BYTES.name
    return time_series_panel(text, *over_ranks(f"({used}{RANKS} / {total}{RANKS})", "avg", "max"))


def _errors() -> PanelBuilder:
    text = count_text(
        "GPU errors",
        "New errors within each interval, of the GPUs with the most: XID errors reported by the driver, and "
        "uncorrectable memory errors. Investigate every one; the event of type `xid` in the store contains its "
        "number.",
        minimum=0,
    )
    xid = f"sum by (run, rank) {increase(hardware.GPU_XID_ERRORS)} > 0"
    errors = increase(hardware.GPU_ECC_ERRORS, 'type="uncorrected"')
    ecc = f"sum by (run, rank) {errors} > 0"
    return time_series_panel(
        text,
        Query(f"topk by (run) ({MAX_LINES // 2}, {xid})", "{{run}} rank {{rank}} XID"),
        Query(f"topk by (run) ({MAX_LINES // 2}, {ecc})", "{{run}} rank {{rank}} ECC"),
    )


def _error_counts() -> PanelBuilder:
    text = count_text(
        "GPUs with memory errors",
        "ECC errors since the driver was loaded, of the 20 GPUs with the most. Corrected errors cost nothing, but a "
        "GPU with a growing number of them is likely to have uncorrectable errors later.",
    )
    columns = {"run": "Run", "rank": "Rank", "gpu": "GPU", "type": "Type"}
    counts = f"max by ({', '.join(columns)}) ({hardware.GPU_ECC_ERRORS.name}{RANKS})"
    query = Query(f"topk(20, {counts} > 0)")
    return table_panel(text, query, {**columns, "Value": "Errors"})


def _allocated() -> PanelBuilder:
    text = PanelText(
        title="PyTorch memory",
        description="Device memory that is allocated to tensors, and memory reserved by PyTorch's allocator, of the "
        "rank with the highest value. A line that rises at every step is a leak, often a loss that is stored together "
        "with its graph.",
        unit="bytes",
        minimum=0,
    )
    held = Query(f"max by (run) ({hardware.DEVICE_ALLOCATED_BYTES.name}{RANKS})", "{{run}} allocated")
    kept = Query(f"max by (run) ({hardware.DEVICE_RESERVED_BYTES.name}{RANKS})", "{{run}} reserved")
    return time_series_panel(text, held, kept)


def _retries() -> PanelBuilder:
    text = count_text(
        "Allocation retries",
        "Number of times within each interval, over all ranks, that PyTorch freed its cache to get memory, and that "
        "the allocation failed nevertheless. Each retry blocks the rank for milliseconds, and the other ranks wait. "
        "Reduce the batch size, or set `PYTORCH_ALLOC_CONF=expandable_segments:True`.",
        minimum=0,
    )
    retries, ooms = (
        f"sum by (run) {increase(metric)}" for metric in (hardware.DEVICE_ALLOC_RETRIES, hardware.DEVICE_OOMS)
    )
    return time_series_panel(text, Query(retries, "{{run}} retries"), Query(ooms, "{{run}} out of memory"))


def _host_cpu() -> PanelBuilder:
    text = fraction_text(
        "Host CPU",
        "CPU utilisation of the hosts by all processes, mean and highest. At 100 % the data loader and the launching "
        "of kernels delay each other.",
    )
    return time_series_panel(text, *over_ranks(f"({hardware.HOST_CPU_UTILIZATION.name}{RANKS})", "avg", "max"))


def _host_memory() -> PanelBuilder:
    text = PanelText(
        title="Host memory",
        description="Available memory of the host with the least, and resident memory of the largest rank. At 0 the "
        "kernel kills a process, in most cases a rank, and the run ends without an exit event.",
        unit="bytes",
        minimum=0,
    )
    left = Query(f"min by (run) ({hardware.HOST_MEMORY_AVAILABLE_BYTES.name}{RANKS})", "{{run}} available")
    held = Query(f"max by (run) ({hardware.RESIDENT_BYTES.name}{RANKS})", "{{run}} largest rank")
    return time_series_panel(text, left, held)


def _switches() -> PanelBuilder:
    text = PanelText(
        title="Contention",
        description="Involuntary context switches of a rank per second, mean and highest, and page faults that "
        "required a read from disk. Thousands of switches on one rank: too many threads, or another job on the host. "
        "Page faults: the host is short of memory.",
        unit="none",
        minimum=0,
    )
    switches, faults = (
        rate(metric) for metric in (hardware.PROCESS_INVOLUNTARY_SWITCHES, hardware.PROCESS_MAJOR_FAULTS)
    )
    return time_series_panel(
        text,
        *over_ranks(switches, "avg", "max", legend="{{run}} switches,"),
        *over_ranks(faults, "max", legend="{{run}} faults,"),
    )


def _by_method(metric: MetricSpec) -> list[Query]:
    series = f"({metric.name}{RANKS})"
    return over_ranks(series, "avg", "min", by="run, method", legend="{{run}} {{method}}")
