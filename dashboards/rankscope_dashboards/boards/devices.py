"""Speed and devices: how much of its peak the hardware gives, what GPUs and hosts do, and what ails them."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import dashboard as builders

from rankscope_contract import hardware_metrics, metrics
from rankscope_contract.metric_spec import MetricSpec
from rankscope_dashboards.layout import Place, Section, make_board
from rankscope_dashboards.panels import PanelBuilder, Query, Words, lines, rows
from rankscope_dashboards.selectors import RANKS, increase, ranks, rate

MOST: Final = 20
"""The most lines of a panel that shows single ranks."""


def board() -> builders.Dashboard:
    """Return the board."""
    description = "Arithmetic, GPUs and hosts under the ranks of training runs."
    sections = (
        Section("How fast is the arithmetic", (Place(_mfu(), 8, 8), Place(_tflops(), 8, 8), Place(_tokens(), 8, 8))),
        Section(
            "What the GPUs do",
            (
                Place(_utilization(), 8, 8),
                Place(_power(), 8, 8),
                Place(_temperature(), 8, 8),
                Place(_clock(), 8, 8),
                Place(_throttled(), 8, 8),
                Place(_gpu_memory(), 8, 8),
            ),
        ),
        Section("What ails a GPU", (Place(_errors(), 12, 8), Place(_error_counts(), 12, 8))),
        Section("What torch holds", (Place(_allocated(), 12, 8), Place(_retries(), 12, 8))),
        Section("What the hosts do", (Place(_host_cpu(), 8, 8), Place(_host_memory(), 8, 8), Place(_switches(), 8, 8))),
    )
    return make_board("Speed and devices", description, sections)


def _mfu() -> PanelBuilder:
    words = Words(
        title="MFU",
        description="Model FLOPs utilisation: what forward and backward need, without what is computed a second time, "
        "over the peak of the devices. Mean of the ranks and the lowest; `method` says how the FLOPs are known. "
        "Compare a run with itself: a level that falls and stays is a slow GPU, a slow link or a loader.",
        unit="percentunit",
        minimum=0,
    )
    return lines(words, *_mean_and_lowest(hardware_metrics.MFU, "run, method", "{{run}} {{method}}"))


def _tflops() -> PanelBuilder:
    words = Words(
        title="TFLOP/s per GPU",
        description="The same in TFLOP/s of the model on one device, also where no peak is known. Ranks in lockstep "
        "fall together; of the ranks of a pipeline each has what its own stage needs.",
        unit="suffix: TFLOP/s",
        minimum=0,
    )
    return lines(words, *_mean_and_lowest(hardware_metrics.TFLOPS_PER_GPU, "run, method", "{{run}} {{method}}"))


def _tokens() -> PanelBuilder:
    words = Words(
        title="Tokens per second and rank",
        description="What a rank trains on, mean and lowest. Where several ranks compute one copy of the model each of "
        "them counts the same tokens. Empty when training logs none.",
        unit="suffix: tok/s",
        minimum=0,
    )
    speed = rate(metrics.TOKENS)
    return lines(
        words, Query(f"avg by (run) {speed}", "{{run}} mean"), Query(f"min by (run) {speed}", "{{run}} lowest")
    )


def _utilization() -> PanelBuilder:
    words = Words(
        title="GPU utilisation",
        description="Share of the time in which any kernel ran: 100 % can still be a slow kernel, or one that waits "
        "for another rank. Low on all ranks: the loader or the host. Low on one: look at its host.",
        unit="percentunit",
        minimum=0,
        maximum=1,
    )
    return lines(words, *_mean_and_lowest(hardware_metrics.GPU_UTILIZATION, "run", "{{run}}"))


def _power() -> PanelBuilder:
    words = Words(
        title="GPU power",
        description="What the boards draw, mean and lowest, and the lowest limit. The best sign of real work: a GPU "
        "that waits in a collective is fully utilised at half the power.",
        unit="watt",
        minimum=0,
    )
    limit = Query(f"min by (run) ({hardware_metrics.GPU_POWER_LIMIT_WATTS.name}{RANKS})", "{{run}} limit")
    return lines(words, *_mean_and_lowest(hardware_metrics.GPU_POWER_WATTS, "run", "{{run}}"), limit)


def _temperature() -> PanelBuilder:
    words = Words(
        title="GPU temperature",
        description="The hottest board, by sensor. Near the limit of the board its clocks go down; one that is hotter "
        "than its neighbours has a fan, a heat sink or a place in the rack to look at.",
        unit="celsius",
    )
    query = f"max by (run, sensor) ({hardware_metrics.GPU_TEMPERATURE_CELSIUS.name}{RANKS})"
    return lines(words, Query(query, "{{run}} {{sensor}}"))


def _clock() -> PanelBuilder:
    words = Words(
        title="SM clock",
        description="Share of the highest clock, mean and lowest rank. One rank below the others holds all of them up "
        "at every collective. Full load at the power limit lies some percent below 1 on many boards.",
        unit="percentunit",
        minimum=0,
        maximum=1,
    )
    clock, limit = (
        metric.name + ranks('clock="sm"')
        for metric in (hardware_metrics.GPU_CLOCK_HERTZ, hardware_metrics.GPU_CLOCK_LIMIT_HERTZ)
    )
    part = f"{clock} / {limit}"
    return lines(
        words, Query(f"avg by (run) ({part})", "{{run}} mean"), Query(f"min by (run) ({part})", "{{run}} lowest")
    )


def _throttled() -> PanelBuilder:
    words = Words(
        title="Throttled GPUs",
        description="How many GPUs are held below their clocks, by reason. `sw_power_cap` under full load and `idle` "
        "are usual; `hw_slowdown`, `hw_thermal`, `hw_power_brake` and `sw_thermal` mean heat or power.",
        unit="none",
        minimum=0,
        decimals=0,
    )
    # Of a host's common page, what is live and what is stored are series beside each other: each GPU counts once.
    gpus = f"max by (run, rank, gpu, reason) ({hardware_metrics.GPU_THROTTLED.name}{RANKS})"
    query = f"sum by (run, reason) ({gpus}) > 0"
    return lines(words, Query(query, "{{run}} {{reason}}"))


def _gpu_memory() -> PanelBuilder:
    words = Words(
        title="GPU memory",
        description="Share of the device memory in use by all processes, mean and highest rank: what torch reserves, "
        "CUDA's own context, NCCL's buffers, and whoever else is there.",
        unit="percentunit",
        minimum=0,
        maximum=1,
    )
    used, total = hardware_metrics.GPU_MEMORY_USED_BYTES.name, hardware_metrics.GPU_MEMORY_TOTAL_BYTES.name
    part = f"{used}{RANKS} / {total}{RANKS}"
    return lines(
        words, Query(f"avg by (run) ({part})", "{{run}} mean"), Query(f"max by (run) ({part})", "{{run}} highest")
    )


def _errors() -> PanelBuilder:
    words = Words(
        title="GPU errors",
        description="New errors within each interval, of the GPUs with most: XIDs that the driver reported, and memory "
        "errors that could not be corrected. Any of them is a reason to look; the event `xid` in the store has its "
        "number.",
        unit="none",
        minimum=0,
        decimals=0,
    )
    xid = f"sum by (run, rank) {increase(hardware_metrics.GPU_XID_ERRORS)} > 0"
    errors = increase(hardware_metrics.GPU_ECC_ERRORS, 'type="uncorrected"')
    ecc = f"sum by (run, rank) {errors} > 0"
    return lines(
        words,
        Query(f"topk by (run) ({MOST // 2}, {xid})", "{{run}} rank {{rank}} XID"),
        Query(f"topk by (run) ({MOST // 2}, {ecc})", "{{run}} rank {{rank}} ECC"),
    )


def _error_counts() -> PanelBuilder:
    words = Words(
        title="GPUs with memory errors",
        description="ECC errors since the driver was loaded, of the 20 GPUs with most. Corrected ones cost nothing; a "
        "board that gathers many is on its way to uncorrected ones.",
        unit="none",
        decimals=0,
    )
    columns = {"run": "Run", "rank": "Rank", "gpu": "GPU", "type": "Type"}
    counts = f"max by ({', '.join(columns)}) ({hardware_metrics.GPU_ECC_ERRORS.name}{RANKS})"
    query = Query(f"topk(20, {counts} > 0)")
    return rows(words, query, {**columns, "Value": "Errors"})


def _allocated() -> PanelBuilder:
    words = Words(
        title="Memory of torch",
        description="Device memory that tensors hold, and that torch's allocator has reserved, of the rank with most. "
        "A line that climbs from step to step is a leak, often a loss that is kept with its graph.",
        unit="bytes",
        minimum=0,
    )
    held = Query(f"max by (run) ({hardware_metrics.DEVICE_ALLOCATED_BYTES.name}{RANKS})", "{{run}} allocated")
    kept = Query(f"max by (run) ({hardware_metrics.DEVICE_RESERVED_BYTES.name}{RANKS})", "{{run}} reserved")
    return lines(words, held, kept)


def _retries() -> PanelBuilder:
    words = Words(
        title="Allocation retries",
        description="How often torch had to give its cache back to find memory, and failed to, within each interval, "
        "on all ranks. Each retry stops the rank for milliseconds and all others with it: lower the batch, or set "
        "`PYTORCH_ALLOC_CONF=expandable_segments:True`.",
        unit="none",
        minimum=0,
        decimals=0,
    )
    retries, ooms = (
        f"sum by (run) {increase(metric)}"
        for metric in (hardware_metrics.DEVICE_ALLOC_RETRIES, hardware_metrics.DEVICE_OOMS)
    )
    return lines(words, Query(retries, "{{run}} retries"), Query(ooms, "{{run}} out of memory"))


def _host_cpu() -> PanelBuilder:
    words = Words(
        title="Host CPU",
        description="How busy the processors of the hosts are, mean and busiest, by all that runs there. At 100 % the "
        "loader and the launching of kernels wait for each other.",
        unit="percentunit",
        minimum=0,
        maximum=1,
    )
    return lines(words, *_mean_and_highest(hardware_metrics.HOST_CPU_UTILIZATION, "{{run}}"))


def _host_memory() -> PanelBuilder:
    words = Words(
        title="Host memory",
        description="Memory that the host with least can still give, and the resident memory of the rank with most. "
        "When the first reaches zero the kernel kills a process, mostly a rank: the run ends without a word.",
        unit="bytes",
        minimum=0,
    )
    left = Query(f"min by (run) ({hardware_metrics.HOST_MEMORY_AVAILABLE_BYTES.name}{RANKS})", "{{run}} available")
    held = Query(f"max by (run) ({hardware_metrics.RESIDENT_BYTES.name}{RANKS})", "{{run}} largest rank")
    return lines(words, left, held)


def _switches() -> PanelBuilder:
    words = Words(
        title="Contention",
        description="How often per second a rank had to give its processor to somebody else, mean and highest, and "
        "page faults that had to read from disk. Thousands on one rank: too many threads or a neighbour; faults: "
        "memory is short.",
        unit="none",
        minimum=0,
    )
    switches, faults = (
        rate(metric)
        for metric in (hardware_metrics.PROCESS_INVOLUNTARY_SWITCHES, hardware_metrics.PROCESS_MAJOR_FAULTS)
    )
    return lines(
        words,
        Query(f"avg by (run) {switches}", "{{run}} switches, mean"),
        Query(f"max by (run) {switches}", "{{run}} switches, highest"),
        Query(f"max by (run) {faults}", "{{run}} faults, highest"),
    )


def _mean_and_lowest(metric: MetricSpec, by: str, legend: str) -> tuple[Query, Query]:
    series = f"by ({by}) ({metric.name}{RANKS})"
    return Query(f"avg {series}", f"{legend} mean"), Query(f"min {series}", f"{legend} lowest")


def _mean_and_highest(metric: MetricSpec, legend: str) -> tuple[Query, Query]:
    series = f"by (run) ({metric.name}{RANKS})"
    return Query(f"avg {series}", f"{legend} mean"), Query(f"max {series}", f"{legend} highest")
