"""All scalars of a run, as one metric for each name that the script logged, and their histories.

A metric has one line for each text of labels. Losses under other names, such as `val/loss`, are stored under a common
name with the label `source_name`; they are metrics of their own unless the page of the run has a chart of them.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rankscope_contract.metrics.catalogue import SCALARS_WITH_OWN_METRIC, MetricSpec
from rankscope_contract.model import phases
from rankscope_contract.model.scalar_names import SOURCE_NAME, SOURCE_UNIT
from rankscope_contract.rules.score import RULE_SCORE
from rankscope_storage.base.datasets import IMPORTED_FROM
from rankscope_storage.connection import Connection
from rankscope_storage.prometheus.names import HARDWARE_SCALARS, MONITOR_SCALARS
from rankscope_view.data.curves import Curve, CurveRequest, curve, joined
from rankscope_view.data.detail import CHARTS, PERPLEXITY, read_chart
from rankscope_view.data.series import History, all_series, pairs, read_measured

HARDWARE: Final = "Host and GPU"
MONITOR: Final = "Step phases and monitor"
UNGROUPED: Final = "Own metrics"
_COUNTS: Final = {"epoch", "tokens", "samples", "global_batch_size", "skipped_iterations", "nan_iterations"}
_NOT_OWN: Final = MONITOR_SCALARS | _COUNTS | {"loss_scale"}
MOST_LINES: Final = 24
"""Largest number of lines of a metric, which a chart shows."""

_ABBREVIATIONS: Final = {"gpu": "GPU", "cpu": "CPU", "ecc": "ECC", "xid": "XID", "pcie": "PCIe", "nvlink": "NVLink"}
_SYMBOLS: Final = {"seconds": "s", "joules": "J", "watts": "W", "celsius": "°C", "hertz": "Hz"}
_TITLES: Final = {
    phases.PHASE_SECONDS: "Time by phase since the start, s",
    phases.STEP_PHASE_SECONDS: "Time of a step by phase, s",
    phases.PRE_COLLECTIVE_SECONDS: "Time of a step before collectives, s",
    phases.PRE_COLLECTIVE_TOTAL: "Time before collectives since the start, s",
    "overhead_seconds": "CPU time of Rankscope by thread since the start, s",
    "sampling_stretch": "Factor of the sampling interval",
    "step_seconds": "Step time, s",
    "tflops_per_gpu": "TFLOP/s of the device",
    "mfu": "Share of the peak FLOP/s (MFU)",
    "device_memory_ooms_total": "Device memory failures in total",
}


def _title(scalar: str, spec: MetricSpec) -> str:
    plain = scalar if scalar.endswith("memory_total_bytes") else scalar.removesuffix("_total")
    words = [_ABBREVIATIONS.get(word, word) for word in plain.removesuffix(f"_{spec.unit}").split("_")]
    total = " in total" if spec.type == "counter" else ""
    unit = "share" if plain.endswith("utilization") else _SYMBOLS.get(spec.unit or "", spec.unit)
    return f"{words[0][:1].upper()}{' '.join(words)[1:]}{total}{f', {unit}' if unit and unit != plain else ''}"


SCALAR_TITLES: Final = {
    name: _TITLES.get(name) or _title(name, SCALARS_WITH_OWN_METRIC[name])
    for name in sorted(HARDWARE_SCALARS | MONITOR_SCALARS)
}
"""Titles with units, for people, of the scalars that the monitor adds to those of the training script."""

_SUMMARIES: Final = """\
SELECT name, labels, count(*) AS rows, arg_max(value, (attempt, cumulative_step)) AS last,
  arg_max(step, (attempt, cumulative_step)) AS last_step,
  min(value) FILTER (isfinite(value)) AS lowest,
  arg_min(step, (value, cumulative_step)) FILTER (isfinite(value)) AS lowest_step,
  max(value) FILTER (isfinite(value)) AS highest,
  arg_max(step, (value, -cumulative_step)) FILTER (isfinite(value)) AS highest_step
FROM scalar_history WHERE run = $run AND stands AND name IN (SELECT unnest($names)) GROUP BY name, labels"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One scalar of a run. `labels` has the texts of labels of its lines."""

    name: str  # as the script logged it
    stored: str
    labels: tuple[str | None, ...]

    @property
    def group(self) -> str:
        """Return the heading below which pages show the metric: the part of its name before the first slash."""
        if self.stored in HARDWARE_SCALARS or self.stored in _NOT_OWN:
            return HARDWARE if self.stored in HARDWARE_SCALARS else MONITOR
        return group_of(self.name)

    def words(self, labels: str | None) -> str:
        """Return the labels of a line as words such as `group 0`; empty without labels."""
        kept = {key: value for key, value in _parsed(labels).items() if key not in (SOURCE_NAME, SOURCE_UNIT)}
        words = ", ".join(f"{key} {value}" for key, value in kept.items())
        return words.replace("_", " ") if self.group in (HARDWARE, MONITOR) else words

    def title(self, labels: str | None) -> str:
        """Return the name of the line with these labels."""
        words = self.words(labels)
        return f"{self.name} ({words})" if words else self.name


def group_of(name: str) -> str:
    """Return the heading below which pages show a metric of the script."""
    prefix, slash, _ = name.partition("/")
    return prefix if slash and prefix else UNGROUPED


def _parsed(labels: str | None) -> Mapping[str, str]:
    try:
        found = json.loads(labels or "{}")
    except ValueError:
        return {"labels": labels or ""}
    return found if isinstance(found, dict) else {"labels": str(labels)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The metrics of a run by name, in alphabetical order, without those of CHARTS.

    `sources` has the names under which the script logged scalars of CHARTS, where they differ from the stored names.
    """

    found: Mapping[str, Metric]
    sources: Mapping[str, str]

    @property
    def own(self) -> list[Metric]:
        """Return the metrics that the script logged, those without a prefix first."""
        own = (metric for metric in self.found.values() if metric.group not in (HARDWARE, MONITOR))
        return sorted(own, key=lambda metric: (metric.group != UNGROUPED, metric.name))


def read_metrics(connection: Connection, run: str) -> Metrics:
    """Return the metrics of `run`, without the scores of rules, which have one line for each rule and tensor."""
    series: dict[str, set[str]] = {}
    for dataset in ("scalars", "scalar_rollups"):
        for name, labels in pairs(connection, dataset, run, "name", "labels"):
            if name != RULE_SCORE and f'"{IMPORTED_FROM}":' not in labels:
                series.setdefault(name, set()).add(labels)
    found: dict[str, list[str | None]] = {}
    stored_as: dict[str, str] = {}
    sources: dict[str, str] = {}
    for stored, texts in sorted(series.items()):
        main = min(texts) if stored in CHARTS and stored != PERPLEXITY else None
        for labels in sorted(texts):
            parsed = _parsed(labels)
            # A value that an import converted to another unit is not that of the original name.
            name = stored if SOURCE_UNIT in parsed else str(parsed.get(SOURCE_NAME, stored))
            if labels == main:
                sources |= {stored: name} if name != stored else {}
                continue
            if name != stored and (name in series or stored_as.get(name, stored) != stored):
                name = stored  # the name under which the script logged it is that of another scalar
            if name in CHARTS:  # such as the learning rates of several groups
                name = f"{name} by {' and '.join(parsed)}" if parsed else f"logged {name}"
                found.setdefault(name, [main or None] if main is not None and parsed else [])
            stored_as[name] = stored
            found.setdefault(name, []).append(labels or None)
    metrics = {name: Metric(name=name, stored=stored_as[name], labels=tuple(found[name])) for name in sorted(found)}
    return Metrics(found=metrics, sources=sources)


def metric_histories(connection: Connection, run: str, metric: Metric, rank: int | None = None) -> list[History]:
    """Return the histories of the lines of a metric, of all ranks or one, in the order of `labels`."""
    chosen = [(metric.stored, labels or "") for labels in metric.labels[:MOST_LINES]]
    found = all_series(connection, run, chosen, rank)
    return [found[one] if one in found else read_measured(connection, run, *one, rank) for one in chosen]


def metric_curve(metric: Metric, histories: Sequence[History], request: CurveRequest) -> Curve:
    """Return the curve of a metric, with one line for each of its `histories`, in the order of its labels."""
    curves = []
    for history, labels in zip(histories, metric.labels, strict=False):
        drawn, key = curve(history, request), f"{metric.stored}{labels or ''}"
        curves.append(replace(drawn, lines=tuple(replace(line, key=key) for line in drawn.lines)))
    words = [metric.words(labels) for labels in metric.labels]
    return joined(curves, words) if any(words) else curves[0]


def scalar_lines(connection: Connection, run: str, name: str, rank: int | None = None) -> list[tuple[str, History]]:
    """Return the lines of a scalar of `run`, of all ranks or one, as pairs of words and rows; empty without any.

    `name` is stored, a name under which the script logged the scalar, or the perplexity. The scores of rules are in SQL
    and PromQL only: each has another scale, and a line for each tensor has few rows.
    """
    stored = name
    if name not in CHARTS:
        metrics = read_metrics(connection, run)
        if (metric := metrics.found.get(name)) is not None:
            histories = metric_histories(connection, run, metric, rank)
            return [(metric.words(labels), one) for labels, one in zip(metric.labels, histories, strict=False)]
        stored = next((stored for stored, source in metrics.sources.items() if source == name), name)
    history = read_chart(connection, run, stored, rank)
    return [("", history)] if len(history) and name != RULE_SCORE else []


def own_histories(connection: Connection, run: str, most: int) -> dict[str, History]:
    """Return the histories of the first lines of metrics that the script of `run` logged, by name and labels."""
    found: dict[str, History] = {}
    for metric in read_metrics(connection, run).own[:most]:
        for labels, history in zip(metric.labels, metric_histories(connection, run, metric), strict=False):
            found[metric.title(labels)] = history
    return dict(itertools.islice(found.items(), most))


def close_names(connection: Connection, run: str, name: str) -> list[str]:
    """Return names of scalars of `run` that are similar to `name`, or the first ones."""
    metrics = read_metrics(connection, run)
    known = [*metrics.found, *metrics.sources.values(), *CHARTS]
    return difflib.get_close_matches(name, known, n=5, cutoff=0.4) or known[:5]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSummary:
    """The newest value of a line of a metric, and its range over the steps that are not superseded.

    A value is the mean over the ranks that logged it at the step. `lowest` and `highest` are of finite values,
    each with the first step that has it.
    """

    name: str
    rows: int
    last: float
    last_step: int | None
    lowest: float | None
    lowest_step: int | None
    highest: float | None
    highest_step: int | None


def metric_summaries(connection: Connection, run: str) -> tuple[MetricSummary, ...]:
    """Return the summaries of all metrics that the script of `run` logged."""
    own = read_metrics(connection, run).own
    rows = connection.query(_SUMMARIES, {"run": run, "names": sorted({one.stored for one in own})}).to_pylist()
    stored = {(row.pop("name"), row.pop("labels")): row for row in rows}
    found = []
    for metric in own:
        for labels in metric.labels:
            row = stored.get((metric.stored, labels))
            if row is not None:
                found.append(MetricSummary(name=metric.title(labels), **row))
    return tuple(found)
