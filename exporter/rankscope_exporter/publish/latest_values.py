"""The latest values of a rank for the metrics page. They are collected from each record when the record is published.

All values of a kind come from one record, so the page never combines values of two steps. For each group of replicas,
the page has one number that combines the hashes of all tensors. Ranks of the group show the same number while their
tensors are equal.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, Final

from rankscope_contract.model.events import Event, EventType
from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS
from rankscope_contract.rules.base import AnomalyRule
from rankscope_exporter.records.record import Scalar, Statistics, StepRecord

_BYTES: Final = 6
"""Size in bytes of a combined hash.

A Prometheus sample is a float64, which represents integers up to 53 bits exactly.
"""


def combined(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return, for each group of replicas, a number below 2^48 that combines the hashes of all its tensors in `rows`.

    The result does not depend on the order of the rows.
    """
    groups: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        if row["replicas"] is not None:
            key = (str(row["kind"]), str(row["tensor"]), str(row.get("vpp_stage")), str(row["hash"]))
            groups.setdefault(row["replicas"], []).append(key)
    found = {}
    for replicas, keys in groups.items():
        text = "\n".join("\t".join(key) for key in sorted(keys)).encode("utf-8", "replace")
        found[replicas] = int.from_bytes(hashlib.blake2b(text, digest_size=_BYTES).digest(), "big")
    return found


FeatureKey = tuple[str, str, str]  # kind, module, op


def feature_bounds(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[FeatureKey, float]]:
    """Return, for each kind in `rows`, the lowest and the highest value of each module. A NaN is both."""
    found: dict[str, dict[FeatureKey, float]] = {}
    for row in rows:
        kind, module, value = str(row.get("kind")), str(row.get("module")), row.get("value")
        if not isinstance(value, Real):  # the encoder of the record counts rows with wrong types
            continue
        of_kind = found.setdefault(kind, {})
        for op, choose in (("min", min), ("max", max)):
            key = (kind, module, op)
            number = float(value)
            of_kind[key] = number if math.isnan(number) else choose(of_kind.get(key, number), number)
    return found


MAX_ANOMALY_SERIES: Final = 200
MAX_SCALAR_SERIES: Final = 1000
MAX_FEATURE_SERIES: Final = 1000
OTHER_TENSOR: Final = "_other"
NO_KIND: Final = ""
"""Value of the label `kind` for rules on logged scalars, because scalars have no kind."""

_TENSOR_OPS: Final = (*VALUE_OPS, *COUNT_OPS)

RuleKind = tuple[str, str]
AnomalySeries = tuple[str, str, str, str]  # rule, kind, tensor, op
ScalarKey = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The statistics of one step, and the kinds of tensors for which these statistics are the latest."""

    step: int | None
    statistics: Statistics
    kinds: frozenset[str]


@dataclass(slots=True)
class Snapshot:
    """The latest values of a rank. They contain the values of a record completely or not at all."""

    taken_at: float = 0.0  # monotonic seconds
    step: int | None = None
    statistics: dict[str, tuple[int | None, Statistics]] = field(default_factory=dict)  # by kind, with their step
    tensors_version: int = 0  # differs whenever `statistics` does
    scalars: dict[ScalarKey, Scalar] = field(default_factory=dict)
    scalars_left_out: set[ScalarKey] = field(default_factory=set)
    features_of_kinds: dict[str, dict[FeatureKey, float]] = field(default_factory=dict)
    features_left_out: int = 0  # the most so far, because a counter must not decrease
    anomalies: dict[RuleKind, int] = field(default_factory=dict)
    anomaly_series: dict[AnomalySeries, int] = field(default_factory=dict)
    firing: dict[RuleKind, bool] = field(default_factory=dict)
    fired_at: dict[RuleKind, float] = field(default_factory=dict)  # monotonic seconds of the latest firing
    skipped_steps: int = 0
    replica_hashes: dict[str, tuple[int | None, int]] = field(default_factory=dict)  # step and hash by replicas

    @property
    def tensors(self) -> tuple[Sampled, ...]:
        """Return one element for each record that contains the latest statistics of a kind."""
        found: dict[int, tuple[int | None, Statistics, list[str]]] = {}
        for kind, (step, statistics) in self.statistics.items():
            found.setdefault(id(statistics), (step, statistics, []))[2].append(kind)
        return tuple(Sampled(step, statistics, frozenset(kinds)) for step, statistics, kinds in found.values())

    @property
    def features(self) -> Mapping[FeatureKey, float]:
        values = ((key, value) for of_kind in self.features_of_kinds.values() for key, value in of_kind.items())
        return dict(itertools.islice(values, MAX_FEATURE_SERIES))

    @property
    def left_out(self) -> int:
        """Return the number of scalars and features above the limits. It never decreases."""
        return len(self.scalars_left_out) + self.features_left_out


class LatestValues:
    """Collects the latest values from published records and returns snapshots of these values. Thread-safe."""

    def __init__(self, rules: Sequence[AnomalyRule], *, clock: Callable[[], float] = time.monotonic) -> None:
        """The function `clock` returns a monotonic time in seconds."""
        self._clock = clock
        self._rules = tuple(rules)
        self._lock = threading.Lock()
        self._now = Snapshot()
        self._announced: set[str] = set()
        self.announce((NO_KIND,))

    def announce(self, kinds: Iterable[str]) -> None:
        """Add anomaly counters with value 0 of each kind and its rules, before the first record with these kinds."""
        with self._lock:
            self._announce(kinds)

    def update(self, record: StepRecord) -> None:
        """Update the latest values from `record`.

        The call is cheap: it stores references and does not read the statistics of tensors.
        """
        hashes = combined(record.hashes)
        features = feature_bounds(record.features)
        with self._lock:
            now = self._now
            now.features_of_kinds.update(features)
            left_out = sum(map(len, now.features_of_kinds.values())) - MAX_FEATURE_SERIES
            now.features_left_out = max(now.features_left_out, left_out)
            now.replica_hashes.update((replicas, (record.step, value)) for replicas, value in hashes.items())
            if record.step is not None:
                now.step = record.step
            # A record of hardware metrics, between steps, contains no logged scalars.
            judged = {NO_KIND} if record.scalars and record.step is not None else set()
            if record.statistics is not None:
                kinds = record.statistics.plan.kinds
                judged.update(kinds)
                self._announce(kinds)
                now.statistics.update(dict.fromkeys(kinds, (record.step, record.statistics)))
                now.tensors_version += 1
            for scalar in record.scalars:
                self._store_scalar(scalar)
            now.firing.update((pair, False) for pair in now.firing if pair[1] in judged)
            for pair in record.firing:
                now.firing[pair] = True
                now.anomalies.setdefault(pair, 0)
            for event in record.events:
                self._count(event)

    def snapshot(self) -> Snapshot:
        """Return a copy of the latest values."""
        with self._lock:
            copies = {item.name: copy.copy(getattr(self._now, item.name)) for item in fields(Snapshot)}
            return Snapshot(**copies | {"taken_at": self._clock()})

    def _announce(self, kinds: Iterable[str]) -> None:
        for kind in kinds:
            if kind in self._announced:
                continue
            self._announced.add(kind)
            ops = _TENSOR_OPS if kind else ("value",)
            for rule in self._rules:
                if any(rule.judges(kind or None, op) for op in ops):
                    self._now.anomalies.setdefault((rule.name, kind), 0)
                    self._now.firing.setdefault((rule.name, kind), False)

    def _store_scalar(self, scalar: Scalar) -> None:
        key, now = (scalar.name, tuple(sorted(scalar.labels.items()))), self._now
        if key in now.scalars or len(now.scalars) < MAX_SCALAR_SERIES:
            now.scalars[key] = scalar
        elif len(now.scalars_left_out) < MAX_SCALAR_SERIES:  # limited; the page needs no exact number
            now.scalars_left_out.add(key)

    def _count(self, event: Event) -> None:
        now = self._now
        if event.type == EventType.STEP_SKIPPED:
            now.skipped_steps += 1
        if event.type != EventType.ANOMALY or event.rule is None:
            return
        pair = (event.rule, event.kind or NO_KIND)
        now.anomalies[pair] = now.anomalies.get(pair, 0) + 1
        now.fired_at[pair] = self._clock()
        now.firing.setdefault(pair, False)
        series = (*pair, event.tensor or "", event.op or "")
        if series not in now.anomaly_series and len(now.anomaly_series) >= MAX_ANOMALY_SERIES:
            series = (*pair, OTHER_TENSOR, event.op or "")
        now.anomaly_series[series] = now.anomaly_series.get(series, 0) + 1
