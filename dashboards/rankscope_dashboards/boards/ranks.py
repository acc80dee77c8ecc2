"""The Grafana board "Ranks": slow ranks, phases of a step, GPUs, memory, hosts and replicas of one run."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import dashboard as builders

from rankscope_contract.metrics import catalogue, hardware
from rankscope_contract.metrics.spec import MetricSpec
from rankscope_contract.model.phases import LABEL, Phase
from rankscope_dashboards.boards.elements.annotations import RUN_ANNOTATIONS
from rankscope_dashboards.boards.elements.board import Section, SizedPanel, make_board
from rankscope_dashboards.boards.elements.panels import (
    NO_GPU,
    NO_TORCH_DEVICE,
    Column,
    PanelBuilder,
    PanelText,
    Query,
    count_text,
    fraction_text,
    over_ranks,
    stacked,
    table_panel,
    time_series_panel,
)
from rankscope_dashboards.boards.elements.selectors import ALL_RANKS, RANKS, increase, once, ranks, rate

MAX_LINES: Final = 10
"""Largest number of lines in a panel that has one line per rank."""

NO_WAIT_MEASURED: Final = "The framework of this run does not show when a rank waits for others"
NO_HASHES: Final = "The quantity hashes is not measured in this run"


def board() -> builders.Dashboard:
    """Return the board "Ranks" without its uid, which `boards()` sets."""
    sections = (
        Section(
            "Slow ranks",
            (SizedPanel(_slowest(), 8, 9), SizedPanel(_compute_time(), 8, 9), SizedPanel(_behind(), 8, 9)),
        ),
        Section(
            "Phases of a step",
            (SizedPanel(_time_by_phase(), 8, 9), SizedPanel(_latest_step(), 8, 9), SizedPanel(_data_wait(), 8, 9)),
        ),
        Section(
            "Hosts and replicas",
            (
                SizedPanel(_host_cpu(), 6, 8),
                SizedPanel(_host_memory(), 6, 8),
                SizedPanel(_switches(), 6, 8),
                SizedPanel(_replica_divergence(), 6, 8),
            ),
        ),
        Section("GPUs", _gpu_panels()),
        Section("GPU errors", (SizedPanel(_errors(), 12, 8), SizedPanel(_error_counts(), 12, 8))),
        Section("GPU memory of PyTorch", (SizedPanel(_allocated(), 12, 8), SizedPanel(_retries(), 12, 8))),
    )
    description = "Slow ranks, phases, GPUs and hosts of one run."
    return make_board("Ranks", description, sections, annotations=RUN_ANNOTATIONS)


def _gpu_panels() -> tuple[SizedPanel, ...]:
    panels = (_utilization(), _power(), _temperature(), _clock(), _throttled(), _gpu_memory())
    return tuple(SizedPanel(panel, 8, 8) for panel in panels)


def _slowest() -> PanelBuilder:
    text = PanelText(
        title="Slow ranks",
        description=f"Time for data and computation of the {MAX_LINES} slowest ranks, relative to the median rank. "
        "Check ranks above 1.1. A rank at 1.25 can make each step of the whole job a quarter longer: check its clocks, "
        "other jobs on its host, and, in the panel Wait for data, its data.",
        unit="none",
        minimum=0,
        decimals=2,
        empty=NO_WAIT_MEASURED,
    )
    waiting = f"sum by (run, rank) {_waits_for_data()}"
    computing = f"sum by (run, rank) {rate(catalogue.PRE_COLLECTIVE_TOTAL)}"
    own = f"({computing} + {waiting} or {computing})"
    relative = f"{own} / on (run) group_left () (quantile by (run) (0.5, {own}) > 0)"
    return time_series_panel(text, Query(f"topk by (run) ({MAX_LINES}, {relative})", "rank {{rank}}"))


def _compute_time() -> PanelBuilder:
    text = PanelText(
        title="Compute time before the collective",
        description="Seconds of the latest step in which a rank computed before it waited for other ranks, of the rank "
        "with the highest and the rank with the lowest value. Step times are equal on all ranks because ranks wait for "
        "each other; the compute time is not. Two curves apart: look for the rank in the panel Slow ranks.",
        unit="s",
        minimum=0,
        empty=NO_WAIT_MEASURED,
    )
    return time_series_panel(text, *over_ranks(f"({catalogue.PRE_COLLECTIVE_SECONDS.name}{RANKS})", "max", "min"))


def _behind() -> PanelBuilder:
    text = count_text(
        "Steps behind",
        f"Steps that the {MAX_LINES} ranks furthest behind have completed less than the first rank. 0 or 1 is normal. "
        "A rank that falls behind has stopped: check its log, and `rankscope summary RUN`.",
        minimum=0,
    )
    leader = f"max by (run) ({catalogue.STEP.name}{ALL_RANKS})"
    behind = f"{leader} - on (run) group_right () max by (run, rank) ({catalogue.STEP.name}{RANKS})"
    return time_series_panel(text, Query(f"topk by (run) ({MAX_LINES}, {behind})", "rank {{rank}}"))


def _time_by_phase() -> PanelBuilder:
    text = fraction_text(
        "Time by phase",
        "Time of all ranks in each phase, divided by their whole time; the sum is 1. If `data_wait` grows, check the "
        "data loader. If `collective` grows, a rank or a link is slow: see the first row of this board.",
        maximum=None,
    )
    seconds = rate(catalogue.PHASE_SECONDS)  # not the mean of a phase: ranks may lack a phase
    query = f"sum by (run, {LABEL}) {seconds} / on (run) group_left () sum by (run) {seconds}"
    return stacked(time_series_panel(text, Query(query, f"{{{{{LABEL}}}}}")))


def _latest_step() -> PanelBuilder:
    text = PanelText(
        title="Phases of the latest step",
        description="Seconds in each phase of the step at the latest scrape, mean of the ranks, measured by the "
        "clocks of the ranks or their devices. Phases that cannot be distinguished with the framework in use are "
        "missing. A phase that takes longer than before is the place to look for the cause of slow steps.",
        unit="s",
        minimum=0,
    )
    seconds = _each(catalogue.STEP_PHASE_SECONDS)
    ranks_with_steps = f"count by (run) (count by (run, rank) {seconds})"
    query = f"sum by (run, {LABEL}) {seconds} / on (run) group_left () {ranks_with_steps}"
    return stacked(time_series_panel(text, Query(query, f"{{{{{LABEL}}}}}")))


def _data_wait() -> PanelBuilder:
    text = fraction_text(
        "Wait for data",
        f"Fraction of the time in which a rank waits for its next batch, of the {MAX_LINES} ranks with the highest "
        "values. One high rank: check its disk and its loader workers. All ranks high: check the data source. "
        "Unannounced work of the script between an update and the next forward pass counts as waiting.",
        maximum=None,
    )
    query = f"topk by (run) ({MAX_LINES}, sum by (run, rank) {_waits_for_data()})"
    return time_series_panel(text, Query(query, "rank {{rank}}"))


def _waits_for_data() -> str:
    return rate(catalogue.PHASE_SECONDS, f'{LABEL}="{Phase.DATA_WAIT}"')


def _utilization() -> PanelBuilder:
    text = fraction_text(
        "GPU utilisation",
        "Fraction of the time in which any kernel ran. At 100 % a kernel can still be slow, or wait for another rank. "
        "Low on all ranks: check the data loader and the host CPU. Low on one rank: check its host.",
        empty=NO_GPU,
    )
    return time_series_panel(text, *over_ranks(_each(hardware.GPU_UTILIZATION), "avg", "min"))


def _power() -> PanelBuilder:
    text = PanelText(
        title="GPU power",
        description="Power draw, mean and lowest GPU, and the lowest power limit. This is the best indicator of real "
        "work: a GPU that waits in a collective shows full utilisation at half the power.",
        unit="watt",
        minimum=0,
        empty=NO_GPU,
    )
    limit = Query(f"min by (run) ({hardware.GPU_POWER_LIMIT_WATTS.name}{RANKS})", "limit")
    return time_series_panel(text, *over_ranks(_each(hardware.GPU_POWER_WATTS), "avg", "min"), limit)


def _temperature() -> PanelBuilder:
    text = PanelText(
        title="GPU temperature",
        description="Temperature of the hottest GPU, by sensor. Near its limit a GPU reduces its clocks. If one GPU "
        "is hotter than its neighbours, check its fan, heat sink and position in the rack.",
        unit="celsius",
        empty=NO_GPU,
    )
    query = f"max by (run, sensor) ({hardware.GPU_TEMPERATURE_CELSIUS.name}{RANKS})"
    return time_series_panel(text, Query(query, "{{sensor}}"))


def _clock() -> PanelBuilder:
    text = fraction_text(
        "SM clock",
        "SM clock as a fraction of its maximum, mean and lowest rank. One rank below the others delays all ranks at "
        "every collective. At full load and the power limit, many GPUs are some percent below 1.",
        empty=NO_GPU,
    )
    relative = _ratio(hardware.GPU_CLOCK_HERTZ, hardware.GPU_CLOCK_LIMIT_HERTZ, 'clock="sm"')
    return time_series_panel(text, *over_ranks(relative, "avg", "min"))


def _throttled() -> PanelBuilder:
    text = count_text(
        "Throttled GPUs",
        "Number of GPUs with reduced clocks, by reason. `sw_power_cap` under full load and `idle` are normal. "
        "`hw_slowdown`, `hw_thermal`, `hw_power_brake` and `sw_thermal` indicate a problem with heat or power.",
        minimum=0,
        empty="No GPU is throttled, or there is none",
    )
    # If Prometheus scrapes `/node/metrics` of each host, live and stored samples of a GPU are two series.
    return time_series_panel(text, Query(f"sum by (run, reason) {_each(hardware.GPU_THROTTLED)} > 0", "{{reason}}"))


def _gpu_memory() -> PanelBuilder:
    text = fraction_text(
        "GPU memory",
        "Fraction of the device memory that all processes use, mean and highest rank: memory reserved by PyTorch, the "
        "CUDA context, NCCL buffers, and memory of other processes. Above 95 % the next larger batch fails.",
        empty=NO_GPU,
    )
    used = _ratio(hardware.GPU_MEMORY_USED_BYTES, hardware.GPU_MEMORY_TOTAL_BYTES)
    return time_series_panel(text, *over_ranks(used, "avg", "max"))


def _errors() -> PanelBuilder:
    text = count_text(
        "GPU errors",
        "New errors within each interval, of the GPUs with the most: XID errors reported by the driver, and "
        "uncorrectable memory errors. Investigate every one; the event of type `xid` in the store contains its "
        "number.",
        minimum=0,
        empty="No GPU error in the time range, or no GPU",
    )
    xid = f"sum by (run, rank) {increase(hardware.GPU_XID_ERRORS)} > 0"
    errors = increase(hardware.GPU_ECC_ERRORS, 'type="uncorrected"')
    ecc = f"sum by (run, rank) {errors} > 0"
    return time_series_panel(
        text,
        Query(f"topk by (run) ({MAX_LINES}, {xid})", "rank {{rank}} XID"),
        Query(f"topk by (run) ({MAX_LINES}, {ecc})", "rank {{rank}} ECC"),
    )


def _error_counts() -> PanelBuilder:
    text = count_text(
        "GPUs with memory errors",
        "ECC errors since the driver was loaded, of the 20 GPUs with the most. Corrected errors cost nothing, but a "
        "GPU with a growing number of them is likely to have uncorrectable errors later.",
        empty="No GPU has ECC errors, or there is no GPU",
    )
    columns = {
        "rank": Column(heading="Rank", width=80, is_number=True),
        "gpu": Column(heading="GPU"),
        "type": Column(heading="Type", width=120),
        "Value": Column(heading="Errors", width=100),
    }
    counts = f"max by (rank, gpu, type) ({hardware.GPU_ECC_ERRORS.name}{RANKS})"
    return table_panel(text, (Query(f"topk(20, {counts} > 0)"),), columns)


def _allocated() -> PanelBuilder:
    text = PanelText(
        title="PyTorch memory",
        description="Device memory that is allocated to tensors, and memory reserved by PyTorch's allocator, of the "
        "rank with the highest value. A line that rises at every step is a leak, often a loss that is stored together "
        "with its graph.",
        unit="bytes",
        minimum=0,
        empty=NO_TORCH_DEVICE,
    )
    held = Query(f"max by (run) ({hardware.DEVICE_ALLOCATED_BYTES.name}{RANKS})", "allocated")
    kept = Query(f"max by (run) ({hardware.DEVICE_RESERVED_BYTES.name}{RANKS})", "reserved")
    return time_series_panel(text, held, kept)


def _retries() -> PanelBuilder:
    text = count_text(
        "Allocation retries",
        "Number of times within each interval, over all ranks, that PyTorch freed its cache to get memory, and that "
        "the allocation failed nevertheless. Each retry blocks the rank for milliseconds, and the other ranks wait. "
        "Reduce the batch size, or set `PYTORCH_ALLOC_CONF=expandable_segments:True`.",
        minimum=0,
        empty=NO_TORCH_DEVICE,
    )
    retries, ooms = (
        f"sum by (run) {increase(metric)}" for metric in (hardware.DEVICE_ALLOC_RETRIES, hardware.DEVICE_OOMS)
    )
    return time_series_panel(text, Query(retries, "retries"), Query(ooms, "out of memory"))


def _host_cpu() -> PanelBuilder:
    text = fraction_text(
        "Host CPU",
        "CPU utilisation of the hosts by all processes, mean and highest. At 100 % the data loader and the launching "
        "of kernels delay each other.",
    )
    return time_series_panel(text, *over_ranks(_each(hardware.HOST_CPU_UTILIZATION), "avg", "max"))


def _host_memory() -> PanelBuilder:
    text = PanelText(
        title="Host memory",
        description="Available memory of the host with the least, and resident memory of the largest rank. At 0 the "
        "kernel kills a process, in most cases a rank, and the run ends without an exit event.",
        unit="bytes",
        minimum=0,
    )
    left = Query(f"min by (run) ({hardware.HOST_MEMORY_AVAILABLE_BYTES.name}{RANKS})", "available")
    held = Query(f"max by (run) ({hardware.RESIDENT_BYTES.name}{RANKS})", "largest rank")
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
        *over_ranks(switches, "avg", "max", legend="switches,"),
        *over_ranks(faults, "max", legend="faults,"),
    )


def _replica_divergence() -> PanelBuilder:
    text = count_text(
        "Replica divergence",
        "Number of replica groups whose ranks hold different parameters although these should be bit-identical. 0 is "
        "normal. Above 0: `rankscope anomalies RUN` shows step, tensor and ranks. From this step on, the ranks train "
        "different models.",
        empty=NO_HASHES,
    )
    value, step = (
        f"by (run, replicas) ({metric.name}{ALL_RANKS})"
        for metric in (catalogue.REPLICA_HASH, catalogue.REPLICA_HASH_STEP)
    )
    differs, comparable = f"max {value} != bool min {value}", f"max {step} == bool min {step}"
    return time_series_panel(text, Query(f"sum by (run) (({differs}) * ({comparable}))", "diverged groups"))


def _each(metric: MetricSpec) -> str:
    return once(metric, metric.name + RANKS)


def _ratio(part: MetricSpec, whole: MetricSpec, *matchers: str) -> str:
    selector = ranks(*matchers)
    return once(part, f"{part.name}{selector} / {whole.name}{selector}")
