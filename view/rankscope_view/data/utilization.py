"""Utilisation of the GPUs of a run: from a field of its log, from NVML, or estimated. Each value names its method.

A measured utilisation is the share of time in which a kernel ran. It is high for a GPU that computes slowly.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rankscope_storage.connection import Connection
from rankscope_view.data.history import History, main_labels, read_history
from rankscope_view.data.ranks import hosts_and_world
from rankscope_view.data.speed import Speed

FIELD: Final = "gpu_util"
NVML: Final = "gpu_utilization"
QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
_FASTEST: Final = 0.05
"""Quantile of the step times that counts as the peak speed of a run."""

_FEWEST_STEPS: Final = 20

_GPUS: Final = """\
WITH sample AS (
  SELECT rank, labels->>'$.gpu' AS gpu, value * CASE WHEN unit = 'percent' AND max(value) OVER () > 1
    THEN 0.01 ELSE 1 END AS value, ts
  FROM {scalars} WHERE run = $run AND name = $name AND isfinite(value)
)
SELECT rank, gpu, count(*) AS samples, avg(value) AS mean, min(value) AS lowest, max(value) AS highest,
  quantile_cont(value, [{quantiles}]) AS quantiles
FROM sample GROUP BY rank, gpu ORDER BY rank NULLS FIRST, TRY_CAST(gpu AS INTEGER) NULLS FIRST, gpu"""


class Method(enum.StrEnum):
    """Origin of the utilisation of the GPUs."""

    FIELD = "field"
    NVML = "nvml"
    FLOPS = "flops"
    PACE = "pace"


_WORDS: Final = {
    Method.FIELD: f"measured: field {FIELD} of the log",
    Method.NVML: "measured: NVML",
    Method.FLOPS: "estimated: achieved FLOP/s divided by the peak (MFU)",
    Method.PACE: "estimated: throughput divided by global batch / step time of the fastest 5 % of steps, "
    "at most the time without data wait",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Utilisation of one GPU, from 0 to 1. Without samples, the quantiles and extremes are empty or None."""

    rank: int | None
    gpu: str | None
    host: str | None
    samples: int
    mean: float | None
    lowest: float | None
    highest: float | None
    quantiles: tuple[float, ...]  # at QUANTILES

    @property
    def label(self) -> str:
        """Return the rank, or the number of the GPU in a log without ranks."""
        if self.rank is not None:
            return str(self.rank)
        return "all" if self.gpu is None else self.gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """Utilisation of the GPUs of a run from 0 to 1, with its method."""

    value: float
    method: Method
    gpus: tuple[Gpu, ...] = ()  # of measured values

    @property
    def words(self) -> str:
        """Return the method in words."""
        return _WORDS[self.method]


def read_utilization(
    connection: Connection, run: str, speed: Speed, *, peak_tflops: float | None = None
) -> Utilization | None:
    """Return the utilisation of the GPUs by the first method that the data allow; None if none does.

    `peak_tflops` is the peak of one GPU, for logs with the achieved TFLOP/s and without the utilisation.
    """
    for name, method in ((FIELD, Method.FIELD), (NVML, Method.NVML)):
        gpus = read_gpus(connection, run, name)
        means = [gpu.mean for gpu in gpus if gpu.mean is not None]
        if means:
            return Utilization(value=float(np.mean(means)), method=method, gpus=gpus)
    share = model_flops_share(connection, run, peak_tflops)
    if share is not None:
        return Utilization(value=share, method=Method.FLOPS)
    pace = _pace(speed)
    return None if pace is None else Utilization(value=pace, method=Method.PACE)


def read_gpus(connection: Connection, run: str, name: str) -> tuple[Gpu, ...]:
    """Return the utilisation of each GPU, and a GPU without samples for each rank that has none."""
    source = connection.relation("scalars", run=run)
    query = _GPUS.format(scalars=source, quantiles=", ".join(map(str, QUANTILES)))
    rows = connection.query(query, {"run": run, "name": name}).to_pylist()
    if not rows:
        return ()
    hosts, world = hosts_and_world(connection, run)
    found = [_gpu(row, hosts) for row in rows]
    seen = {gpu.rank for gpu in found}
    if None not in seen:
        found += [_gpu({"rank": rank}, hosts) for rank in range(world) if rank not in seen]
    return tuple(sorted(found, key=lambda gpu: (gpu.rank is not None, gpu.rank or 0)))


def _gpu(row: Mapping[str, Any], hosts: Mapping[int, str]) -> Gpu:
    names = ("rank", "gpu", "mean", "lowest", "highest")
    columns = {name: row.get(name) for name in names}
    quantiles: Sequence[float] = row.get("quantiles") or ()
    return Gpu(**columns, host=hosts.get(row["rank"]), samples=row.get("samples", 0), quantiles=tuple(quantiles))


def model_flops_share(connection: Connection, run: str, peak_tflops: float | None) -> float | None:
    """Return the median model FLOP/s utilisation of a run: logged, or from the achieved TFLOP/s and the peak."""
    labels = main_labels(connection, run, ["mfu", "tflops_per_gpu"])
    if "mfu" in labels:
        share = _median(read_history(connection, run, "mfu", labels["mfu"]))
        return share / 100 if share is not None and share > 1 else share  # imported logs have per cent
    if peak_tflops and "tflops_per_gpu" in labels:
        achieved = _median(read_history(connection, run, "tflops_per_gpu", labels["tflops_per_gpu"]))
        return None if achieved is None else achieved / peak_tflops
    return None


def _median(history: History) -> float | None:
    values = history.value[history.stands & np.isfinite(history.value)]
    return float(np.median(values)) if len(values) else None


def _pace(speed: Speed) -> float | None:
    """Return the measured throughput divided by the ideal one: the global batch in the time of the fastest steps."""
    measured = speed.throughput
    if speed.step_times is None or measured is None or measured.median is None or not speed.global_batch:
        return None
    times = speed.step_times.value[np.isfinite(speed.step_times.value)]
    if not speed.has_gpus or measured.name != "samples_per_second" or len(times) < _FEWEST_STEPS:
        return None
    ideal = speed.global_batch / float(np.quantile(times, _FASTEST))
    most = 1.0 if speed.data_wait is None else 1.0 - speed.data_wait.value
    return min(most, measured.median * measured.ranks / ideal)
