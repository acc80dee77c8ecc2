"""Hints for tuning the speed of a training, each attached to the observation that triggers it."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rankscope_contract.model.phases import Phase
from rankscope_view.data.detail import speed_change
from rankscope_view.data.ranks import RankRow, RankTable
from rankscope_view.data.speed import MOST_DEVIATION, Method, Speed, Throughput, Utilization

MOST_DATA_WAIT: Final = 0.1
"""Share of the step time in which a rank waits for data, from which on the loading of data is worth tuning."""

MOST_COLLECTIVE: Final = 0.2
"""Share of the step time in which ranks wait for collectives, from which on communication is worth tuning."""

LEAST_UTILIZATION: Final = 0.7
"""Measured utilisation below which the GPUs are under-used."""

LEAST_FLOPS: Final = 0.3
"""Share of the peak FLOP/s below which the GPUs are under-used. Large trainings reach 0.35 to 0.5."""

LOW_THROUGHPUT: Final = 0.85
"""P10 of the throughput divided by its median, below which the speed has strong swings."""

LEAST_MEMORY: Final = 0.5
"""Share of device memory in use below which a larger micro-batch fits."""

_FEWEST_ROWS: Final = 20


class Area(enum.StrEnum):
    """Part of a training that a hint concerns."""

    DATA = "data"
    COMPUTE = "compute"
    COMMUNICATION = "communication"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """An observation, and the actions to try because of it."""

    side: Area
    observation: str
    actions: tuple[str, ...]


DATA_ACTIONS: Final = (
    "raise the number of loader workers (num_workers) and prefetch_factor",
    "use pinned memory with asynchronous copies",
    "pack short samples into full sequences",
)
COMPUTE_ACTIONS: Final = (
    "train in mixed precision (bf16)",
    "use a fused attention such as flash attention",
    "raise the micro-batch, or accumulate fewer of them",
)
COMMUNICATION_ACTIONS: Final = (
    "raise the bucket size, so that reductions overlap with the backward pass",
    "check that GPUs of a host reach each other directly (P2P, NVLink)",
    "accumulate gradients over more micro-batches",
    "with ZeRO-3 and offload, check the PCIe bandwidth, or use a lower stage",
)
WAIT_ACTIONS: Final = ("find on the page of ranks which rank makes the others wait, and in which phase",)
SYSTEM_ACTIONS: Final = (
    "check clocks, power limit and temperature of the GPU",
    "check disk and network of the host, and which other programs use its processors",
)
_OF_GPUS: Final = re.compile(r"\bGPUs?\b|PCIe|pinned")
"""Regular expression for actions that do not apply to a training on CPUs."""


def tuning_hints(speed: Speed, utilization: Utilization | None, ranks: RankTable | None = None) -> tuple[Hint, ...]:
    """Return the hints that apply, in the order data, compute, communication, system."""
    data, compute = _data_hints(speed), _compute_hints(speed, utilization, ranks)
    found = (*data, *compute, *_communication_hints(speed), *_system_hints(speed, ranks))
    if speed.has_gpus:
        return found
    return tuple(
        replace(one, actions=tuple(each for each in one.actions if not _OF_GPUS.search(each))) for one in found
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _data_hints(speed: Speed) -> Iterator[Hint]:
    wait = speed.data_wait
    if wait is not None and wait.value >= MOST_DATA_WAIT:
        observation = f"{_percent(wait.value)} of the step time is waiting for data ({wait.source})"
        yield Hint(side=Area.DATA, observation=observation, actions=DATA_ACTIONS)
    check = speed.batch_check
    if check is not None and check.is_off:
        yield Hint(
            side=Area.DATA,
            observation=(
                f"throughput × step time is {check.samples:,.4g} samples, {_percent(abs(check.difference))} "
                f"{'more' if check.difference > 0 else 'fewer'} than the global batch of {check.global_batch:,.0f}"
            ),
            actions=(
                "check the units of the log: per GPU or of all GPUs, per micro-batch or per step",
                "if fewer, time between steps is lost: measure data loading, evaluation and checkpoints",
            ),
        )


def _compute_hints(speed: Speed, utilization: Utilization | None, ranks: RankTable | None) -> Iterator[Hint]:
    waits = max((share.value for share in (speed.data_wait, speed.collective) if share is not None), default=0.0)
    if utilization is not None and waits < MOST_COLLECTIVE:
        limit = LEAST_FLOPS if utilization.method is Method.FLOPS else LEAST_UTILIZATION
        if utilization.value < limit:
            observation = f"the GPUs are used to {_percent(utilization.value)} ({utilization.words})"
            yield Hint(side=Area.COMPUTE, observation=observation, actions=COMPUTE_ACTIONS)
    memory = _memory_share(() if ranks is None else ranks.rows)
    if memory is not None and memory < LEAST_MEMORY:
        actions = ("raise the micro-batch, or turn off activation checkpointing",)
        observation = f"at most {_percent(memory)} of the device memory is in use"
        yield Hint(side=Area.COMPUTE, observation=observation, actions=actions)


def _memory_share(rows: Sequence[RankRow]) -> float | None:
    """Return the largest share of device memory that any rank uses; None without measurements."""
    names = ("device_memory_reserved_bytes", "device_memory_allocated_bytes")
    shares = [
        row.latest[name] / row.latest["gpu_memory_total_bytes"]
        for row in rows
        for name in names
        if name in row.latest and row.latest.get("gpu_memory_total_bytes")
    ]
    return max(shares, default=None)


def _communication_hints(speed: Speed) -> Iterator[Hint]:
    wait = speed.collective
    if wait is not None and wait.value >= MOST_COLLECTIVE:
        is_network = wait.value - speed.for_slower >= MOST_COLLECTIVE
        slower = "" if is_network else f", {_percent(speed.for_slower)} for slower ones"
        observation = f"{_percent(wait.value)} of the step time is waiting for other ranks ({wait.source}){slower}"
        actions = COMMUNICATION_ACTIONS if is_network else WAIT_ACTIONS
        yield Hint(side=Area.COMMUNICATION, observation=observation, actions=actions)


def _system_hints(speed: Speed, ranks: RankTable | None) -> Iterator[Hint]:
    loads = speed.data_wait is not None and speed.data_wait.value >= MOST_DATA_WAIT
    for row in () if ranks is None else ranks.rows:
        if row.slow is not None:
            loads |= row.slow.phase == Phase.DATA_WAIT
            where = f" on {row.host}" if row.host else ""
            yield Hint(
                side=Area.SYSTEM,
                observation=f"rank {row.rank}{where} {row.slow.words}",
                actions=DATA_ACTIONS if row.slow.phase == Phase.DATA_WAIT else SYSTEM_ACTIONS,
            )
    if speed.throughput is None:
        return
    change = speed_change(speed.throughput.history)
    if change is not None and change[0] <= -MOST_DEVIATION:
        yield Hint(
            side=Area.SYSTEM,
            observation=f"the throughput has fallen by {_percent(-change[0])} since step {change[1]:,}",
            actions=("first shorten the wait for data, which another hint names",) if loads else SYSTEM_ACTIONS,
        )
    yield from _swings(speed.throughput)


def _swings(throughput: Throughput) -> Iterator[Hint]:
    """Yield a hint if a tenth of the steps is much slower than the median."""
    if len(throughput.finite) < _FEWEST_ROWS or not throughput.low or not throughput.median:
        return
    if throughput.rows_below and throughput.low < LOW_THROUGHPUT * throughput.median:
        distances = np.diff(np.flatnonzero(throughput.finite < throughput.low))
        is_regular = len(distances) > 1 and bool((distances == distances[0]).all())
        when = f", each {int(distances[0])} rows" if is_regular else ""
        yield Hint(
            side=Area.SYSTEM,
            observation=(
                f"a tenth of the rows is below {throughput.low:,.4g} {throughput.unit} (P10){when}; "
                f"the median is {throughput.median:,.4g}"
            ),
            actions=(
                "compare these steps with checkpoints and evaluations: dips there are normal",
                "otherwise look for stalls of data loading, I/O or the network",
            ),
        )
