"""Render the `/metrics` page of a rank.

The package prometheus_client renders a few dozen metric families, and pyarrow renders the statistics of tensors. With
prometheus_client, a hundred samples are cheap. For tens of thousands of samples, it would hold the GIL and delay the
training.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from rankscope_contract import SCHEMA_VERSION, __version__
from rankscope_contract.metrics import catalogue
from rankscope_contract.metrics.catalogue import MetricSpec
from rankscope_contract.model.identity import Identity
from rankscope_contract.rules.base import AnomalyRule
from rankscope_exporter.records.step_record import Scalar
from rankscope_exporter.serving.latest_values import MAX_FEATURE_SERIES, LatestValues, ScalarKey, Snapshot
from rankscope_exporter.serving.tensor_exposition import TensorLines, TensorRenderer

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Samples of one metric family: for each sample, its value and its label values except those of `run` and `rank`."""

_PAGE_OWNED: Final = (catalogue.OVERHEAD_SECONDS, catalogue.SAMPLING_STRETCH)
"""Metrics with values from `ExporterStats`.

The metrics page leaves out logged scalars with the names of these metrics.
"""
_NO_LINES: Final = TensorLines((), 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterStats:
    """State of the exporter itself, such as its overhead, at the time of a scrape."""

    faults: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    overhead_seconds: Mapping[str, float] = field(default_factory=dict)
    sampling_stretch: int | None = None
    collectives: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # calls and bytes by operation
    ring_records: int = 0
    ring_uncommitted: int = 0


class Exposition:
    """Renders the metrics page of one rank from its latest values.

    Any number of threads may call the method `pieces` at the same time.
    """

    def __init__(
        self,
        identity: Identity,
        latest: LatestValues,
        stats: Callable[[], ExporterStats],
        *,
        rules: Sequence[AnomalyRule],
        series_budget: int,
        all_ops: bool = False,
        planned_steps: int | None = None,
        device: str = "",
    ) -> None:
        self._labels = (identity.run, str(identity.rank))
        self._latest = latest
        self._stats = stats
        self._planned_steps = planned_steps
        self._info = (
            identity.host,
            str(identity.local_rank),
            str(identity.world_size),
            identity.incarnation,
            identity.launch_id,
            device,
        )
        names = dict(zip(catalogue.TENSOR_VALUE.all_labels, self._labels, strict=False))
        self._renderer = TensorRenderer(names, rules, series_budget, all_ops=all_ops)
        self._rendering = threading.Lock()
        self._rendered: tuple[int, TensorLines] = (0, _NO_LINES)
        self._most_left_out: dict[str, int] = {}

    def pieces(self) -> tuple[Any, ...]:
        """Return the metrics page as a sequence of byte buffers.

        All statistics of one kind of tensor come from the same record.
        """
        snapshot = self._latest.snapshot()
        lines = self._tensor_lines(snapshot)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(tuple(self._families(snapshot))))
        return (generate_latest(registry), *lines.pieces)

    def _tensor_lines(self, snapshot: Snapshot) -> TensorLines:
        with self._rendering:  # a second scrape of the same step waits for the first one and uses its lines
            version, lines = self._rendered
            if version < snapshot.tensors_version:
                lines = self._renderer.render(snapshot.tensors)
                self._rendered = (snapshot.tensors_version, lines)
                # The maximum so far: a counter must not decrease, and a sum over all scrapes would count scrapes.
                most = self._most_left_out
                for reason, count in (("series_budget", lines.over_budget), ("series_ambiguous", lines.ambiguous)):
                    most[reason] = max(most.get(reason, 0), count)
            return lines

    def _families(self, snapshot: Snapshot) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        for spec, samples in self._samples(snapshot):
            make = CounterMetricFamily if spec.type == "counter" else GaugeMetricFamily
            family = make(spec.name, spec.help, labels=spec.all_labels)
            for labels, value in samples:
                family.add_metric([_utf8(label) for label in (*self._labels, *labels)], value)
            if family.samples:
                yield family

    def _samples(self, snapshot: Snapshot) -> Iterator[tuple[MetricSpec, Samples]]:
        stats = self._stats()
        torch = getattr(sys.modules.get("torch"), "__version__", "")
        dropped = dict(stats.dropped)
        for reason, left_out in self._most_left_out.items():
            dropped[reason] = dropped.get(reason, 0) + left_out
        features = dict(itertools.islice(snapshot.features.items(), MAX_FEATURE_SERIES))
        left_out = snapshot.scalars_left_out + len(snapshot.features) - len(features)
        dropped["series_budget"] = dropped.get("series_budget", 0) + left_out
        kind_steps = [
            ((kind,), float(sampled.step))
            for sampled in snapshot.tensors
            if sampled.step is not None
            for kind in sorted(sampled.kinds)
        ]
        yield catalogue.BUILD_INFO, [((__version__, str(SCHEMA_VERSION), str(torch)), 1.0)]
        yield catalogue.RUN_INFO, [(self._info, 1.0)]
        yield catalogue.STEP, _one(snapshot.step)
        yield catalogue.STEPS_PLANNED, _one(self._planned_steps)
        yield catalogue.KIND_STEP, kind_steps
        yield catalogue.FEATURE_VALUE, features.items()
        yield catalogue.SKIPPED_STEPS, _one(snapshot.skipped_steps)
        yield catalogue.RULE_THRESHOLD, _by_name(snapshot.thresholds)
        yield catalogue.RULE_FIRING, snapshot.firing.items()
        yield catalogue.ANOMALY_EVENTS, snapshot.anomalies.items()
        yield catalogue.ANOMALY_AGE, snapshot.anomaly_ages.items()
        yield catalogue.TENSOR_ANOMALY_EVENTS, snapshot.anomaly_series.items()
        hashes = snapshot.replica_hashes
        yield catalogue.REPLICA_HASH, [((item.replicas,), float(item.value)) for item in hashes]
        yield catalogue.REPLICA_HASH_STEP, [((h.replicas,), float(h.step)) for h in hashes if h.step is not None]
        yield from _scalar_samples(snapshot.scalars)
        yield catalogue.OVERHEAD_SECONDS, _by_name(stats.overhead_seconds)
        yield catalogue.SAMPLING_STRETCH, _one(stats.sampling_stretch)
        yield catalogue.COLLECTIVE_CALLS, [((op,), calls) for op, (calls, _) in stats.collectives.items()]
        yield catalogue.COLLECTIVE_BYTES, [((op,), total) for op, (_, total) in stats.collectives.items()]
        yield catalogue.FAULTS, _one(stats.faults)
        yield catalogue.DROPPED, _by_name(dropped)
        yield catalogue.RING_RECORDS, _one(stats.ring_records)
        yield catalogue.RING_UNCOMMITTED, _one(stats.ring_uncommitted)


@dataclass(frozen=True, slots=True, eq=False)
class _Families:
    """A collector for prometheus_client that returns a fixed tuple of metric families."""

    families: tuple[GaugeMetricFamily | CounterMetricFamily, ...]

    def collect(self) -> Iterable[Any]:
        return self.families


def _scalar_samples(scalars: Mapping[ScalarKey, Scalar]) -> Iterator[tuple[MetricSpec, Samples]]:
    """Yield a metric and its samples for all logged scalars.

    If the metric catalogue of `rankscope_contract` has no metric for a scalar of this name and labels, the scalar
    becomes a sample of the metric `rankscope_scalar`.
    """
    own: dict[str, dict[tuple[str, ...], float]] = {}
    others: dict[tuple[str, ...], float] = {}
    for scalar in scalars.values():
        spec = catalogue.SCALARS_WITH_OWN_METRIC.get(scalar.name)
        if spec in _PAGE_OWNED:
            continue
        if spec is None or not set(scalar.labels) <= set(spec.labels):
            # Labels that the metric does not have become part of the name: otherwise two scalars would share a series.
            others[(scalar.name + (scalar.labels_text or ""),)] = scalar.value
        else:
            samples = own.setdefault(scalar.name, {})
            samples[tuple(scalar.labels.get(label, "") for label in spec.labels)] = scalar.value
    for name, samples in own.items():
        yield catalogue.SCALARS_WITH_OWN_METRIC[name], samples.items()
    yield catalogue.SCALAR, others.items()


def _utf8(text: str) -> str:
    """Return `text` with `?` for each lone surrogate: UTF-8 cannot encode them, and the whole page would fail."""
    return text.encode("utf-8", "replace").decode()


def _one(value: float | None) -> Samples:
    return () if value is None else (((), value),)


def _by_name(values: Mapping[str, float]) -> Samples:
    return (((name,), value) for name, value in values.items())
