"""The Grafana board "Ranks": slow ranks, phases of a step, GPUs, memory, hosts and replicas of one run.

The rows of GPUs are folded, because many runs have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from grafana_foundation_sdk.builders import dashboard as builders

from rankscope_contract.metrics import catalogue, hardware
from rankscope_contract.metrics.spec import MetricSpec
from rankscope_contract.model.phases import LABEL, Phase
from rankscope_dashboards.boards.elements.annotations import RUN_ANNOTATIONS
from rankscope_dashboards.boards.elements.board import Section, make_board, sized
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
    stat_panel,
    table_panel,
    time_series_panel,
)
from rankscope_dashboards.boards.elements.selectors import (
    AHEAD,
    ALL_RANKS,
    OF_HOSTS,
    RANKS,
    SERVICE_RUN,
    at_end,
    increase,
    once,
    ranks,
    rate,
    service,
)
from rankscope_dashboards.boards.elements.variables import HOST, RANK, RUN

MAX_LINES: Final = 10
"""Largest number of lines in a panel that has one line per rank."""

_SM: Final = 'clock="sm"'
NO_WAIT_MEASURED: Final = "The framework of this run does not show when a rank waits for others"
NO_HASHES: Final = "The quantity hashes is not measured in this run"


def board() -> builders.Dashboard:
    """Return the board "Ranks" without its uid, which `boards()` sets."""
    sections = (
        Section("Slow ranks", sized(12, 9, _slowest(), _data_wait(), _behind(), _compute_time())),
        Section("Phases of a step", sized(12, 9, _time_by_phase(), _latest_step())),
        Section(
            "Hosts and replicas",
            sized(24, 7, _hosts())
            + sized(12, 8, _host_cpu(), _host_memory())
            + sized(6, 8, _processes(), _switches(), _disk(), _replica_divergence()),
        ),
        Section("Collectives", sized(12, 8, *_collectives()), is_folded=True),
        Section(
            "GPUs",
            sized(12, 8, _utilization(), _power(), _gpu_memory(), _temperature())
            + sized(8, 8, _links())
            + sized(6, 8, _clock(), _throttled())
            + sized(4, 8, _energy()),
            is_folded=True,
        ),
        Section("GPU errors", sized(12, 8, _errors(), _error_counts()), is_folded=True),
        Section("GPU memory of PyTorch", sized(12, 8, _allocated(), _retries()), is_folded=True),
    )
    description = "Slow ranks, phases, GPUs and hosts of one run."
    variables = (RUN, HOST, RANK)
    return make_board("Ranks", description, sections, variables=variables, annotations=RUN_ANNOTATIONS)


def _slowest() -> PanelBuilder:
    text = PanelText(
        title="Slow ranks",
        description=f"Time for data and computation of the {MAX_LINES} slowest ranks, relative to the median rank. "
        "Check ranks above 1.1. A rank at 1.25 can make each step of the whole job a quarter longer: check its clocks, "
        "other jobs on its host, and, in the panel Wait for data, its data.",
        decimals=2,
        empty=NO_WAIT_MEASURED,
    )
    waiting = f"sum by (run, rank) {_waits_for_data()}"
    computing = f"sum by (run, rank) {rate(catalogue.PRE_COLLECTIVE_TOTAL)}"
    own = f"({computing} + {waiting} or {computing})"
    relative = f"({own} / on (run) group_left () (quantile by (run) (0.5, {own}) > 0))"
    return time_series_panel(text, _by_rank(_on_hosts(relative)), many=True)


def _compute_time() -> PanelBuilder:
    text = PanelText(
        title="Compute time before the collective",
        description="Seconds of the latest step in which a rank computed before it waited for other ranks, of the rank "
        "with the highest and the rank with the lowest value. Step times are equal on all ranks because ranks wait for "
        "each other; the compute time is not. Two curves apart: look for the rank in the panel Slow ranks.",
        unit="s",
        empty=NO_WAIT_MEASURED,
    )
    return time_series_panel(text, *over_ranks(_each(catalogue.PRE_COLLECTIVE_SECONDS), "max", "min"))


def _behind() -> PanelBuilder:
    text = count_text(
        "Steps behind",
        f"Steps that the {MAX_LINES} ranks furthest behind have completed less than the first rank. 0 or 1 is normal. "
        "A rank that falls behind has stopped: check its log, and `rankscope summary RUN`.",
    )
    leader = f"max by (run) ({catalogue.STEP.name}{ALL_RANKS})"
    behind = f"clamp_min({leader} - on (run) group_right () max by (run, rank) ({catalogue.STEP.name}{RANKS}), 0)"
    return time_series_panel(text, _by_rank(_on_hosts(behind)), many=True)


def _time_by_phase() -> PanelBuilder:
    text = fraction_text(
        "Time by phase",
        "Time of all ranks in each phase, divided by their whole time; the sum is 1. If `data_wait` grows, check the "
        "data loader. If `collective` grows, a rank or a link is slow: see the first row of this board.",
        maximum=None,
    )
    seconds = _rate(catalogue.PHASE_SECONDS)  # not the mean of a phase: ranks may lack a phase
    query = f"sum by (run, {LABEL}) {seconds} / on (run) group_left () sum by (run) {seconds}"
    return stacked(time_series_panel(text, Query(query, f"{{{{{LABEL}}}}}"), many=True))


def _latest_step() -> PanelBuilder:
    text = PanelText(
        title="Phases of the latest step",
        description="Seconds in each phase of the step at the latest scrape, mean of the ranks, measured by the "
        "clocks of the ranks or their devices. Phases that cannot be distinguished with the framework in use are "
        "missing. A phase that takes longer than before is the place to look for the cause of slow steps.",
        unit="s",
    )
    seconds = _each(catalogue.STEP_PHASE_SECONDS)
    ranks_with_steps = f"count by (run) (count by (run, rank) {seconds})"
    query = f"sum by (run, {LABEL}) {seconds} / on (run) group_left () {ranks_with_steps}"
    return stacked(time_series_panel(text, Query(query, f"{{{{{LABEL}}}}}"), many=True))


def _data_wait() -> PanelBuilder:
    text = fraction_text(
        "Wait for data",
        f"Fraction of its step time in which a rank waits for its next batch, of the {MAX_LINES} ranks with the "
        "highest values. One high rank: check its disk and its loader workers. All ranks high: check the data source. "
        "Unannounced work of the script between an update and the next forward pass counts as waiting.",
        maximum=None,
    )
    share = f"sum by (run, rank) {_waits_for_data()} / (sum by (run, rank) {rate(catalogue.PHASE_SECONDS)} > 0)"
    return time_series_panel(text, _by_rank(_on_hosts(share)), many=True)


def _waits_for_data() -> str:
    return rate(catalogue.PHASE_SECONDS, f'{LABEL}="{Phase.DATA_WAIT}"')


def _utilization() -> PanelBuilder:
    text = fraction_text(
        "GPU utilisation",
        "Fraction of the time in which any kernel ran, of the least busy GPUs, and mean fraction in which memory was "
        "accessed. At 100 % a kernel can still be slow, or wait for another rank. Low on all ranks: check the data "
        "loader and the host CPU. Low on one rank: check its host.",
        empty=NO_GPU,
    )
    memory = over_ranks(_each(hardware.GPU_MEMORY_UTILIZATION), "avg", legend="memory,")
    return time_series_panel(text, _by_gpu(hardware.GPU_UTILIZATION, "bottomk"), *memory, many=True)


def _power() -> PanelBuilder:
    text = PanelText(
        title="GPU power",
        description="Power draw of the GPUs with the least, and the lowest power limit. This is the best indicator of "
        "real work: a GPU that waits in a collective shows full utilisation at half the power.",
        unit="watt",
        empty=NO_GPU,
    )
    limit = over_ranks(_each(hardware.GPU_POWER_LIMIT_WATTS), "min", legend="limit,")
    return time_series_panel(text, _by_gpu(hardware.GPU_POWER_WATTS, "bottomk"), *limit, many=True)


def _temperature() -> PanelBuilder:
    text = PanelText(
        title="GPU temperature",
        description="Temperature of the hottest GPUs, and of the hottest one by sensor. Near its limit a GPU reduces "
        "its clocks. If one GPU is hotter than its neighbours, check its fan, heat sink and position in the rack.",
        unit="celsius",
        empty=NO_GPU,
    )
    hottest = over_ranks(_each(hardware.GPU_TEMPERATURE_CELSIUS), "max", by="run, sensor", legend="{{sensor}},")
    return time_series_panel(text, _by_gpu(hardware.GPU_TEMPERATURE_CELSIUS, "topk"), *hottest, many=True)


def _clock() -> PanelBuilder:
    text = fraction_text(
        "SM clock",
        "SM clock as a fraction of its maximum, mean and lowest rank. One rank below the others delays all ranks at "
        "every collective. At full load and the power limit, many GPUs are some percent below 1.",
        empty=NO_GPU,
    )
    clock, limit = (f"{one.name}{ranks(_SM)}" for one in (hardware.GPU_CLOCK_HERTZ, hardware.GPU_CLOCK_LIMIT_HERTZ))
    relative = _on_hosts(once(hardware.GPU_CLOCK_HERTZ, f"{clock} / {limit}"))
    return time_series_panel(text, *over_ranks(relative, "avg", "min"))


def _throttled() -> PanelBuilder:
    text = count_text(
        "Throttled GPUs",
        "Number of GPUs with reduced clocks, by reason. `sw_power_cap` under full load and `idle` are normal. "
        "`hw_slowdown`, `hw_thermal`, `hw_power_brake` and `sw_thermal` indicate a problem with heat or power.",
        empty="No GPU is throttled, or there is none",
    )
    # If Prometheus scrapes `/node/metrics` of each host, live and stored samples of a GPU are two series.
    return time_series_panel(text, Query(f"sum by (run, reason) {_each(hardware.GPU_THROTTLED)} > 0", "{{reason}}"))


def _gpu_memory() -> PanelBuilder:
    text = PanelText(
        title="GPU memory",
        description="Device memory that all processes use, of the GPUs with the most, and the size of the smallest: "
        "memory reserved by PyTorch, the CUDA context, NCCL buffers, and memory of other processes. Above 95 % of the "
        "size the next larger batch fails.",
        unit="bytes",
        empty=NO_GPU,
    )
    size = over_ranks(_each(hardware.GPU_MEMORY_TOTAL_BYTES), "min", legend="size,")
    return time_series_panel(text, _by_gpu(hardware.GPU_MEMORY_USED_BYTES, "topk"), *size, many=True)


def _links() -> PanelBuilder:
    text = PanelText(
        title="GPU links",
        description="Bytes per second of all selected GPUs over NVLink and PCIe, by direction. NVLink carries the "
        "collectives of a host, PCIe the batches. PCIe as busy as NVLink: peer access between the GPUs may be off.",
        unit="Bps",
        empty=NO_GPU,
    )
    links = {"NVLink": _rate(hardware.GPU_NVLINK_BYTES), "PCIe": _each(hardware.GPU_PCIE_BYTES_PER_SECOND)}
    queries = [Query(f"sum by (run, direction) {of}", f"{name} {{{{direction}}}}") for name, of in links.items()]
    return time_series_panel(text, *queries)


def _energy() -> PanelBuilder:
    text = PanelText(
        title="GPU energy",
        description="Energy of all selected GPUs since the start of the time range, and its curve. It rises with the "
        "power: a run of 64 GPUs at 700 W needs 45 kWh in an hour. Compare runs of the same number of steps.",
        unit="suffix: Wh",
        decimals=1,
        empty=NO_GPU,
    )
    counter = hardware.GPU_ENERGY_JOULES
    first = f"min_over_time({counter.name}{RANKS}[$__range] @ end() offset -$__interval)"
    used = _on_hosts(once(counter, f"{at_end(counter, RANKS, AHEAD)} - {first}"))
    return stat_panel(text, Query(f"sum by (run) {used} / 3600"))


def _errors() -> PanelBuilder:
    text = count_text(
        "GPU errors",
        "New errors within each interval, of the GPUs with the most: XID errors reported by the driver, and "
        "uncorrectable memory errors. Investigate every one; the event of type `xid` in the store contains its "
        "number.",
        empty="No GPU error in the time range, or no GPU",
    )
    counts = {
        "XID": increase(hardware.GPU_XID_ERRORS),
        "ECC": increase(hardware.GPU_ECC_ERRORS, 'type="uncorrected"'),
    }
    queries = (
        replace(_by_rank(f"({_on_hosts(of)} > 0)"), legend=f"rank {{{{rank}}}} {{{{host}}}} {kind}")
        for kind, of in counts.items()
    )
    return time_series_panel(text, *queries, many=True)


def _error_counts() -> PanelBuilder:
    text = count_text(
        "GPUs with errors",
        "ECC errors and PCIe replays since the driver was loaded, and remapped rows, of the 20 GPUs with the most. "
        "Corrected errors cost nothing, but a GPU with a growing number of them is likely to have uncorrectable errors "
        "later. Rows remapped as pending need a reset of the GPU. Many replays: check the seat of the card.",
        empty="No GPU has errors, or there is no GPU",
    )
    columns = {
        "rank": Column(heading="Rank", width=70, is_number=True),
        "gpu": Column(heading="GPU"),
        "type": Column(heading="Type", width=170),
        "Value": Column(heading="Errors", width=85),
    }
    rows, replays = (one.name + RANKS for one in (hardware.GPU_REMAPPED_ROWS, hardware.GPU_PCIE_REPLAYS))
    counts = (
        f"{hardware.GPU_ECC_ERRORS.name}{RANKS}",
        f'label_replace({rows}, "type", "remapped $1", "state", "(.*)")',
        f'label_replace({replays}, "type", "PCIe replays", "", "")',
    )
    most = f"topk(20, max by (rank, gpu, type) ({' or '.join(counts)}) > 0)"
    return table_panel(text, (Query(_short_gpu(most)),), columns)


def _allocated() -> PanelBuilder:
    text = PanelText(
        title="PyTorch memory",
        description="Device memory that is allocated to tensors, and memory reserved by PyTorch's allocator, now and "
        "at most since the start, of the rank with the highest value. A line that rises at every step is a leak, often "
        "a loss that is stored together with its graph.",
        unit="bytes",
        empty=NO_TORCH_DEVICE,
    )
    sizes = {
        "allocated": hardware.DEVICE_ALLOCATED_BYTES,
        "reserved": hardware.DEVICE_RESERVED_BYTES,
        "allocated, peak": hardware.DEVICE_ALLOCATED_PEAK_BYTES,
        "reserved, peak": hardware.DEVICE_RESERVED_PEAK_BYTES,
    }
    return time_series_panel(text, *_highest(sizes))


def _retries() -> PanelBuilder:
    text = count_text(
        "Allocation retries",
        "Number of times within each interval, over all ranks, that PyTorch freed its cache to get memory, and that "
        "the allocation failed nevertheless. Each retry blocks the rank for milliseconds, and the other ranks wait. "
        "Reduce the batch size, or set `PYTORCH_ALLOC_CONF=expandable_segments:True`.",
        empty=NO_TORCH_DEVICE,
    )
    counts = {"retries": hardware.DEVICE_ALLOC_RETRIES, "out of memory": hardware.DEVICE_OOMS}
    queries = (Query(f"sum by (run) {_on_hosts(increase(of))}", name) for name, of in counts.items())
    return time_series_panel(text, *queries)


def _host_cpu() -> PanelBuilder:
    text = fraction_text(
        "Host CPU",
        f"CPU utilisation by all processes, of the {MAX_LINES} hosts with the highest. At 100 % the data loader and "
        "the launching of kernels delay each other.",
    )
    query = f"topk by (run) ({MAX_LINES}, max by (run, host) {_with_host(_each(hardware.HOST_CPU_UTILIZATION))})"
    return time_series_panel(text, Query(query, "host {{host}}"), many=True)


def _host_memory() -> PanelBuilder:
    text = PanelText(
        title="Host memory",
        description="Available memory of the hosts with the least, memory of the smallest host, swap of the host with "
        "the most, and resident memory of the largest rank. At 0 available the kernel kills a process, in most cases a "
        "rank, and the run ends without an exit event.",
        unit="bytes",
    )
    available = _with_host(_each(hardware.HOST_MEMORY_AVAILABLE_BYTES))
    left = f"bottomk by (run) ({MAX_LINES}, min by (run, host) {available})"
    whole = over_ranks(_each(hardware.HOST_MEMORY_TOTAL_BYTES), "min", legend="size,")
    held = _highest({"swap": hardware.HOST_SWAP_USED_BYTES, "largest rank": hardware.RESIDENT_BYTES})
    return time_series_panel(text, Query(left, "available {{host}}"), *whole, *held, many=True)


def _hosts() -> PanelBuilder:
    text = count_text(
        "Ranks and hosts",
        "Host, device and versions of each rank that Prometheus scrapes, and its latest step. All ranks should have "
        "the same versions. A rank that is slow or fails: this table shows the machine to look at.",
        empty="No rank of this run is scraped: it has ended",
    )
    columns = {
        "rank": Column(heading="Rank", width=80, is_number=True),
        "host": Column(heading="Host"),
        "local_rank": Column(heading="Local rank", width=110, is_number=True),
        "device": Column(heading="Device", width=120),
        "version": Column(heading="Rankscope", width=140),
        "torch": Column(heading="PyTorch", width=140),
        "Value": Column(heading="Step", width=110, decimals=0),
    }
    names = ", ".join(list(columns)[:-1])
    info, build = f"{catalogue.RUN_INFO.name}{service(OF_HOSTS)}", f"{catalogue.BUILD_INFO.name}{SERVICE_RUN}"
    versions = f"topk by (run, rank) (1, max by (run, rank, version, torch) ({build}))"
    step = f"max by (run, rank) ({catalogue.STEP.name}{RANKS})"
    joined = f"{info} * on (run, rank) group_left (version, torch) {versions} * on (run, rank) group_left () {step}"
    return table_panel(text, (Query(f"max by ({names}) ({joined})"),), columns)


def _processes() -> PanelBuilder:
    text = PanelText(
        title="Processes",
        description="CPU cores that a rank uses, mean and highest, and the threads of the rank with the most. More "
        "cores than the host has per rank: set `OMP_NUM_THREADS`. Threads that only grow are a leak, often of loaders.",
    )
    cores = over_ranks(_rate(hardware.PROCESS_CPU_SECONDS), "avg", "max", legend="cores,")
    return time_series_panel(text, *cores, *_highest({"threads": hardware.PROCESS_THREADS}))


def _disk() -> PanelBuilder:
    text = PanelText(
        title="Disk of the processes",
        description="Bytes per second that all selected ranks read from storage and write to it. Reads follow the data "
        "loader, writes are checkpoints. No reads while ranks wait for data: the source is elsewhere, or in the cache.",
        unit="Bps",
    )
    rates = {"read": hardware.PROCESS_READ_BYTES, "written": hardware.PROCESS_WRITTEN_BYTES}
    return time_series_panel(text, *(Query(f"sum by (run) {_rate(of)}", name) for name, of in rates.items()))


def _collectives() -> list[PanelBuilder]:
    empty = "No collective is read from torch's flight recorder"
    traffic = PanelText(
        title="Collective traffic",
        description="Message bytes of collectives per second, by operation, sum of the selected ranks. It should be as "
        "level as the speed. It falls with the speed when a rank or a link is slow.",
        unit="Bps",
        empty=empty,
    )
    calls = replace(
        traffic,
        title="Collective calls",
        description="Collectives per second, by operation, sum of the selected ranks. Many calls with little traffic: "
        "the buckets of gradients are too small for the network.",
        unit="suffix: calls/s",
    )
    metrics = ((traffic, catalogue.COLLECTIVE_BYTES), (calls, catalogue.COLLECTIVE_CALLS))
    return [
        time_series_panel(text, Query(f"sum by (run, op) {_rate(of)}", "{{op}}"), many=True) for text, of in metrics
    ]


def _highest(metrics: Mapping[str, MetricSpec]) -> list[Query]:
    return [Query(f"max by (run) {_each(metric)}", name) for name, metric in metrics.items()]


def _switches() -> PanelBuilder:
    text = PanelText(
        title="Contention",
        description="Involuntary context switches of a rank per second, mean and highest, and page faults that "
        "required a read from disk. Thousands of switches on one rank: too many threads, or another job on the host. "
        "Page faults: the host is short of memory.",
    )
    switches = over_ranks(_rate(hardware.PROCESS_INVOLUNTARY_SWITCHES), "avg", "max", legend="switches,")
    faults = over_ranks(_rate(hardware.PROCESS_MAJOR_FAULTS), "max", legend="faults,")
    return time_series_panel(text, *switches, *faults)


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


def _on_hosts(expression: str) -> str:
    """Return PromQL for `expression` without the ranks of hosts that are not selected. Ended ranks have no host."""
    others = service('host!~"$host"')
    return f"({expression} unless on (run, rank) {catalogue.RUN_INFO.name}{others})"


def _with_host(expression: str) -> str:
    """Return PromQL for `expression` with the label `host`, which series of ended ranks lack."""
    # One host for the whole time range: otherwise the legend also has the rank without a host.
    info = f"max by (run, rank, host) (last_over_time({catalogue.RUN_INFO.name}{SERVICE_RUN}[$__range] @ end()))"
    known = f"topk by (run, rank) (1, {info})"
    # The store reads this metric faster than `rankscope_step`.
    unknown = f"group by (run, rank) ({catalogue.STEP_SECONDS.name}{RANKS})"
    return f"({expression} * on (run, rank) group_left (host) ({known} or {unknown} unless on (run, rank) {known}))"


def _each(metric: MetricSpec, *matchers: str) -> str:
    return _on_hosts(once(metric, metric.name + ranks(*matchers)))


def _rate(metric: MetricSpec, *matchers: str) -> str:
    return _on_hosts(rate(metric, *matchers))


def _by_rank(expression: str) -> Query:
    """Return a query for the ranks with the highest values."""
    highest = f"topk by (run) ({MAX_LINES}, max by (run, host, rank) {_with_host(expression)})"
    return Query(highest, "rank {{rank}} {{host}}")


def _by_gpu(metric: MetricSpec, pick: str, *matchers: str) -> Query:
    """Return a query for the GPUs with the highest (`topk`) or lowest (`bottomk`) mean over the time range."""
    series = metric.name + ranks(*matchers)
    chosen = f"{pick}({MAX_LINES}, max by (rank, gpu) (avg_over_time({series}[$__range] @ end())))"
    lines = f"max by (run, host, rank, gpu) {_with_host(_each(metric, *matchers))} and on (rank, gpu) {chosen}"
    return Query(_short_gpu(lines), "{{host}} rank {{rank}} {{gpu}}")


def _short_gpu(query: str) -> str:
    return f'label_replace({query}, "gpu", "$1", "gpu", "GPU-(.{{8}}).*")'
