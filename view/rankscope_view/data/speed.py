"""Speed of a run: throughput, step time, share of data wait and of collectives, and checks of these numbers.

The utilisation of the GPUs is from a field of the log, from NVML, or estimated. Each value names its method. A measured
utilisation is the share of time in which a kernel ran. It is high for a GPU that computes slowly.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from rankscope_contract.model.phases import STEP_PHASE_SECONDS, Phase, shares_text
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.connection import Connection
from rankscope_storage.sql.scalar_history import is_main_source
from rankscope_view.data.documents import flat, json_object
from rankscope_view.data.ranks import hosts_and_world
from rankscope_view.data.series import Floats, History, main_series

STEP_SECONDS: Final = "step_seconds"
UNITS: Final[Mapping[str, str]] = {
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "tokens_per_second_per_gpu": "tokens/s per GPU",
    "tflops_per_gpu": "TFLOP/s per GPU",
    "steps_per_second": "steps/s",
}
"""Scalars that measure the throughput, with their units. The first one that a run logged is its throughput."""

LOW_QUANTILE: Final = 0.1
"""Throughput below this quantile (P10) is marked, because it shows stalls of data loading and of communication."""

MOST_DEVIATION: Final = 0.1
"""Relative difference between throughput × step time and the global batch above which the numbers contradict."""

_TOTALS: Final = {"samples_total": "samples_per_second", "tokens_total": "tokens_per_second"}
_BATCH_NAMES: Final = ("global_batch_size", "global_batch", "global_train_batch_size")
_LOADING: Final = "(data|data_?load(er|ing)?|data_?(fetch|read)(ing)?|batch_(fetch|load|generator)|reader)"
_DATA_NAME: Final = (
    rf"(.*[/.])?({_LOADING}_?(wait_?)?(time|wait|cost|seconds|secs|duration)|load_time)([_/.](s|secs?|seconds|ms))?"
    rf"|(.*[/.])?{_LOADING}_(s|ms)|(.*[/.])?(time|times|timers?|timing)[/.]{_LOADING}|data"
)
"""Regular expression for names of the time in which a step waits for data, after `-` and blanks became `_`."""
_STEPS_NAMED: Final = f"'{STEP_SECONDS}', 'time', 'batch_time', 'batch_cost', 'train_batch_cost'"
"""Names of the time of a step; MMEngine, Detectron2 and torchvision write `time`, PaddlePaddle `batch_cost`."""
_DATA_TIMERS: Final = ("batch-generator", "data-loading", "data_loading")

_STEPS: Final = 1 << 40
"""Larger than any position of a step, so that attempt and position are one number."""

_PHASES: Final = f"""\
WITH phase AS (
  SELECT incarnation, seq, attempt, step, labels->>'$.phase' AS phase, value AS seconds FROM {{scalars}}
  WHERE run = $run AND name = '{STEP_PHASE_SECONDS}' AND isfinite(value) AND {is_main_source()}
), step AS (
  SELECT attempt, step, phase, sum(seconds) AS seconds, count(*) AS ranks, min(seconds) AS least FROM phase
  ANTI JOIN (SELECT * FROM phase WHERE phase = '{Phase.FIRST_STEP}' AND seconds > 0) USING (incarnation, seq)
  GROUP BY ALL)
SELECT phase, sum(seconds) AS seconds,
  sum(seconds - if(ranks = most, ranks * least, 0)) / sum(sum(seconds)) OVER () AS excess
FROM (SELECT *, max(ranks) OVER (PARTITION BY attempt, step) AS most FROM step) GROUP BY phase ORDER BY 2 DESC, 1"""
"""Seconds of each phase, and the share of all time in which a rank is longer in it than the first one of its step."""

_LOGGED: Final = f"""\
WITH chosen AS (
  SELECT name FROM (SELECT DISTINCT name FROM {{scalars}} WHERE run = $run)
  WHERE lower(name) IN ({_STEPS_NAMED}, 'timer_seconds')
    OR regexp_full_match(regexp_replace(lower(name), '[- ]', '_', 'g'), '{_DATA_NAME}')
), scalar AS (
  SELECT coalesce(attempt, 0) AS attempt, coalesce(step, seq) AS position, name, labels->>'$.timer' AS timer,
    avg(value * CASE WHEN unit IS NULL AND regexp_matches(lower(name), '[_/.]ms$') THEN 0.001 ELSE 1 END) AS seconds
  FROM {{scalars}} WHERE run = $run AND isfinite(value) AND name IN (SELECT name FROM chosen) GROUP BY ALL
)
SELECT * FROM (SELECT coalesce('timer ' || loading.timer, loading.name) AS source, step.name AS whole,
  sum(loading.seconds) AS loading, sum(step.seconds) AS step, count(*) AS rows
FROM scalar AS loading JOIN scalar AS step USING (attempt, position)
WHERE lower(step.name) IN ({_STEPS_NAMED}) AND lower(loading.name) NOT IN ({_STEPS_NAMED})
  AND coalesce(loading.timer IN ({", ".join(map(sql_string, _DATA_TIMERS))}), loading.name != 'timer_seconds')
GROUP BY ALL HAVING sum(loading.seconds) >= 0)
ORDER BY whole = '{STEP_SECONDS}' DESC, rows DESC, source, whole"""
_NAMES: Final = (STEP_SECONDS, *UNITS, *_TOTALS, *_BATCH_NAMES)
_RANKS: Final = """\
SELECT name, greatest(count(DISTINCT rank), 1) AS ranks FROM {scalars}
WHERE run = $run AND name IN (SELECT unnest($names)) GROUP BY name"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Throughput of a run over its steps, the mean of `ranks` ranks. `source` names the scalars that it comes from."""

    name: str
    unit: str
    source: str
    ranks: int
    history: History

    @property
    def finite(self) -> Floats:
        """Return the finite values of steps that are not superseded."""
        return _finite(self.history)

    @property
    def median(self) -> float | None:
        """Return the median of all finite values."""
        return _median(self.history)

    @property
    def low(self) -> float | None:
        """Return P10 with linear interpolation; values strictly below it are marked."""
        return float(np.quantile(self.finite, LOW_QUANTILE)) if len(self.finite) else None

    @property
    def rows_below(self) -> int:
        """Return the number of values below P10."""
        return 0 if self.low is None else int((self.finite < self.low).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A share of the step time from 0 to 1, and the scalars that it comes from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCheck:
    """Median throughput times median step time, against the global batch of the run. Both are in samples."""

    samples: float
    global_batch: float

    @property
    def difference(self) -> float:
        """Return the relative difference, such as -0.2 for 20 % fewer samples than the global batch."""
        return self.samples / self.global_batch - 1

    @property
    def is_off(self) -> bool:
        """Return whether the numbers contradict: they differ by more than 10 %."""
        return abs(self.difference) > MOST_DEVIATION


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Throughput and step times of a run. A value of None is unknown.

    Step times are medians over steps that are not superseded.
    """

    throughput: Throughput | None
    step_times: History | None
    step_seconds: float | None
    first_step_seconds: float | None
    global_batch: float | None
    batch_check: BatchCheck | None
    data_wait: Share | None
    collective: Share | None
    for_slower: float = 0.0
    """The part of `collective` in which ranks wait for slower ones; the rest is the time that all ranks need."""
    time_spent: str = ""
    """The share of each phase in the time of all steps after the first, the largest first; empty if unknown."""
    has_gpus: bool = True  # also for logs, which do not name the device


def read_speed(connection: Connection, run: str, histories: Mapping[str, History], config: str | None) -> Speed:
    """Return the speed of `run`. `histories` has the scalars that the caller has read already, by name."""
    with connection.pinned():
        known = main_series(connection, run, [name for name in _NAMES if name not in histories]) | dict(histories)

        def rows(query: str, **parameters: Any) -> list[dict[str, Any]]:
            text = query.format(scalars=connection.relation("scalars", run=run))
            return list(connection.query(text, {"run": run, **parameters}).to_pylist())

        ranks = {row["name"]: row["ranks"] for row in rows(_RANKS, names=list(known))}
        phases = rows(_PHASES)
        logged = [] if phases else rows(_LOGGED)
    step_times, batch = known.get(STEP_SECONDS), _global_batch(known, config)
    samples = _finite(known.get("samples_per_second")) * ranks.get("samples_per_second", 1)
    times, step_seconds = _finite(step_times), _median(step_times)
    seconds = {row["phase"]: row["seconds"] for row in phases}
    data_wait = _phase_share(seconds, Phase.DATA_WAIT) or _logged_share(logged)
    if not seconds and data_wait is not None:
        seconds = {Phase.DATA_WAIT: data_wait.value, "rest": 1 - data_wait.value}
    return Speed(
        throughput=_throughput(known, ranks),
        step_times=step_times,
        step_seconds=step_seconds,
        first_step_seconds=float(times[0]) if len(times) else None,
        global_batch=batch,
        batch_check=_check(samples, step_seconds, batch),
        data_wait=data_wait,
        collective=_phase_share(seconds, Phase.COLLECTIVE),
        for_slower=sum(row["excess"] for row in phases if row["phase"] == Phase.COLLECTIVE),
        time_spent=shares_text(seconds),
        has_gpus=json_object(config).get("device") != "cpu",
    )


def _finite(history: History | None) -> Floats:
    """Return the finite values of the steps that are not superseded."""
    if history is None:
        return np.array([], np.float64)
    return history.value[history.stands & np.isfinite(history.value)]


def _throughput(known: Mapping[str, History], ranks: Mapping[str, int]) -> Throughput | None:
    """Return the throughput: logged, or from totals and step times, or as steps per second."""
    for name, unit in UNITS.items():
        history = known.get(name)
        if history is not None and len(history) > 1:
            return Throughput(name=name, unit=unit, source=name, ranks=ranks.get(name, 1), history=history)
    step_times = known.get(STEP_SECONDS)
    if step_times is None or not len(step_times):
        return None
    for total, name in _TOTALS.items():
        history = known.get(total)
        if history is None:
            continue
        rates = replace(_rates(history, step_times, ranks.get(total, 1)), name=name)
        if len(rates):
            source = f"{total} and {STEP_SECONDS}"
            return Throughput(name=name, unit=UNITS[name], source=source, ranks=1, history=rates)
    with np.errstate(divide="ignore", invalid="ignore"):
        value, lowest, highest = (1 / one for one in (step_times.value, step_times.highest, step_times.lowest))
    history = replace(step_times, name="steps_per_second", value=value, lowest=lowest, highest=highest)
    unit = UNITS["steps_per_second"]
    return Throughput(name="steps_per_second", unit=unit, source=f"1 / {STEP_SECONDS}", ranks=1, history=history)


def _rates(totals: History, step_times: History, ranks: int) -> History:
    """Return the increase of a total per second over all ranks, at the steps that have a step time."""
    of_totals, of_times = (one.attempt * _STEPS + one.cumulative for one in (totals, step_times))
    _, ends, rows = np.intersect1d(of_totals, of_times, return_indices=True)
    ends, rows = ends[ends > 0], rows[ends > 0]
    steps = totals.cumulative[ends] - totals.cumulative[ends - 1]
    seconds = step_times.value[rows] * np.maximum(steps, 1)
    is_same = totals.attempt[ends] == totals.attempt[ends - 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = ranks * (totals.value[ends] - totals.value[ends - 1]) / seconds
    kept = np.flatnonzero(is_same & np.isfinite(rate) & (rate > 0))
    found = step_times.select(rows[kept])
    return replace(found, value=rate[kept], lowest=rate[kept], highest=rate[kept])


def _global_batch(known: Mapping[str, History], config: str | None) -> float | None:
    """Return the newest logged global batch, or that of the configuration."""
    for name in _BATCH_NAMES:
        values = _finite(known.get(name))
        if len(values):
            return float(values[-1])
    return next((value for key, value in numbers_of(config) if key.rpartition(".")[2] in _BATCH_NAMES), None)


def numbers_of(config: str | None) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a configuration in JSON, with keys of nested objects joined by dots."""
    for key, value in flat(json_object(config)):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield key, float(value)


def _check(samples_per_second: Floats, step_seconds: float | None, batch: float | None) -> BatchCheck | None:
    if not len(samples_per_second) or not step_seconds or not batch:
        return None
    return BatchCheck(samples=float(np.median(samples_per_second)) * step_seconds, global_batch=batch)


def _phase_share(seconds: Mapping[str, float], phase: Phase) -> Share | None:
    total = sum(seconds.values())
    if phase not in seconds or not total:
        return None
    return Share(value=seconds[phase] / total, source="timed in each step")


def _logged_share(rows: Sequence[Mapping[str, Any]]) -> Share | None:
    """Return the share of the time for data that a log has; a number without a unit is taken as seconds.

    A time for data that is longer than the steps is no part of them: the share is then that of both together.
    """
    if not rows or not rows[0]["loading"] + rows[0]["step"]:
        return None
    name, whole, loading, step = rows[0]["source"], rows[0]["whole"], rows[0]["loading"], rows[0]["step"]
    if loading > step:
        return Share(value=loading / (loading + step), source=f"{name} / ({name} + {whole})")
    return Share(value=loading / step, source=f"{name} / {whole}")


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
    found = main_series(connection, run, ["mfu", "tflops_per_gpu"])
    if "mfu" in found:
        share = _median(found["mfu"])
        return share / 100 if share is not None and share > 1 else share  # imported logs have per cent
    if peak_tflops and "tflops_per_gpu" in found:
        achieved = _median(found["tflops_per_gpu"])
        return None if achieved is None else achieved / peak_tflops
    return None


def _median(history: History | None) -> float | None:
    values = _finite(history)
    return float(np.median(values)) if len(values) else None


def _pace(speed: Speed) -> float | None:
    """Return the measured throughput divided by the ideal one: the global batch in the time of the fastest steps."""
    measured = speed.throughput
    if speed.step_times is None or measured is None or measured.median is None or not speed.global_batch:
        return None
    times = speed.step_times.value[np.isfinite(speed.step_times.value)]
    is_known = speed.has_gpus and measured.name == "samples_per_second" and len(times) >= _FEWEST_STEPS
    if not is_known or speed.data_wait is None:  # otherwise each steady run has nearly 100 %
        return None
    ideal = speed.global_batch / float(np.quantile(times, _FASTEST))
    return min(1.0 - speed.data_wait.value, measured.median * measured.ranks / ideal)
