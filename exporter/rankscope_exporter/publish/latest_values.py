"""The latest values of a rank for the metrics page. They are collected from each record when the record is published.

All values of a kind come from one record, so the page never combines values of two steps. For each group of replicas,
the page has one number that combines the hashes of all tensors. Ranks of the group show the same number while their
tensors are equal.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final

from rankscope_contract.model.events import Event, EventType
from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS
from rankscope_contract.rules.base import AnomalyRule
from rankscope_exporter.records.plan import NamedPlan
from rankscope_exporter.records.record import Scalar, Statistics, StepRecord

_BYTES: Final = 6
"""Size in bytes of a combined hash.

A Prometheus sample is a float64, which represents integers up to 53 bits exactly.
"""


@dataclass(frozen=True, slots=True)
class ReplicaHash:
    """One hash that combines the hashes of all tensors that the ranks `replicas` share, and the step of these hashes.

    `value` is below 2^48.
    """

    replicas: str
    step: int | None
    value: int


def combined(step: int | None, rows: Iterable[Mapping[str, Any]]) -> list[ReplicaHash]:
    """Return one hash for each group of replicas, combined from the tensor hashes of the group in `rows`.

    The result does not depend on the order of the rows.
    """
    groups: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        if row["replicas"] is None:
            continue
        key = (str(row["kind"]), str(row["tensor"]), str(row.get("vpp_stage")), str(row["hash"]))
        groups.setdefault(row["replicas"], []).append(key)
    found = []
    for replicas, keys in groups.items():
        text = "\n".join("\t".join(key) for key in sorted(keys)).encode("utf-8", "replace")
        value = int.from_bytes(hashlib.blake2b(text, digest_size=_BYTES).digest(), "big")
        found.append(ReplicaHash(replicas, step, value))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A consistent copy of the latest values of a rank. It contains the values of a record completely or not at all."""

    step: int | None
    tensors: tuple[Sampled, ...]
    tensors_version: int  # differs whenever `tensors` does
    scalars: Mapping[ScalarKey, Scalar]
    left_out: int
    """Scalars and features above the limits. Never decreases."""
    features: Mapping[FeatureKey, float]
    anomalies: Mapping[RuleKind, int]
    anomaly_ages: Mapping[RuleKind, float]  # seconds since the latest firing
    anomaly_series: Mapping[AnomalySeries, int]
    firing: Mapping[RuleKind, bool]
    thresholds: Mapping[str, float]
    skipped_steps: int
    replica_hashes: tuple[ReplicaHash, ...] = ()


class LatestValues:
    """Collects the latest values from published records and returns snapshots of these values. Thread-safe."""

    def __init__(self, rules: Sequence[AnomalyRule], *, clock: Callable[[], float] = time.monotonic) -> None:
        """The function `clock` returns a monotonic time in seconds."""
        self._clock = clock
        self._fired_at: dict[RuleKind, float] = {}
        self._rules = tuple(rules)
        self._thresholds = {rule.name: _limit(rule) for rule in self._rules}
        self._lock = threading.Lock()
        self._step: int | None = None
        self._latest: dict[str, tuple[int | None, Statistics]] = {}
        self._version = 0
        self._scalars: dict[ScalarKey, Scalar] = {}
        self._scalars_left_out: set[ScalarKey] = set()
        self._features: dict[str, dict[FeatureKey, float]] = {}
        self._features_left_out = 0  # the most so far, because a counter must not decrease
        self._anomalies: dict[RuleKind, int] = {}
        self._anomaly_series: dict[AnomalySeries, int] = {}
        self._firing: dict[RuleKind, bool] = {}
        self._skipped = 0
        self._replica_hashes: dict[str, ReplicaHash] = {}
        self._kinds_of_plan: dict[str, tuple[str, ...]] = {}
        self.announce((NO_KIND,))

    def announce(self, kinds: Iterable[str]) -> None:
        """Add anomaly counters with value 0 of each kind and its rules, before the first record with these kinds."""
        with self._lock:
            for kind in kinds:
                self._announce(kind)

    def update(self, record: StepRecord) -> None:
        """Update the latest values from `record`.

        The call is cheap: it stores references and does not read the statistics of tensors.
        """
        hashes = combined(record.step, record.hashes) if record.hashes else ()
        features = feature_bounds(record.features) if record.features else {}
        with self._lock:
            if features:
                self._features.update(features)
                left_out = sum(map(len, self._features.values())) - MAX_FEATURE_SERIES
                self._features_left_out = max(self._features_left_out, left_out)
            for item in hashes:
                self._replica_hashes[item.replicas] = item
            if record.step is not None:
                self._step = record.step
            # A record of hardware metrics, between steps, contains no logged scalars.
            judged = {NO_KIND} if record.scalars and record.step is not None else set()
            if record.statistics is not None:
                kinds = self._kinds(record.statistics.plan)
                judged.update(kinds)
                for kind in kinds:
                    self._latest[kind] = (record.step, record.statistics)
                self._version += 1
            for scalar in record.scalars:
                self._store_scalar(scalar)
            for pair in self._firing:
                if pair[1] in judged:
                    self._firing[pair] = False
            for pair in record.firing:
                self._firing[pair] = True
                self._anomalies.setdefault(pair, 0)
            for event in record.events:
                self._count(event)

    def snapshot(self) -> Snapshot:
        """Return a copy of the latest values. A record is included completely or not at all."""
        with self._lock:
            features = ((key, value) for of_kind in self._features.values() for key, value in of_kind.items())
            return Snapshot(
                step=self._step,
                tensors=_by_record(self._latest),
                tensors_version=self._version,
                scalars=dict(self._scalars),
                left_out=len(self._scalars_left_out) + self._features_left_out,
                features=dict(itertools.islice(features, MAX_FEATURE_SERIES)),
                anomalies=dict(self._anomalies),
                anomaly_ages={pair: self._clock() - at for pair, at in self._fired_at.items()},
                anomaly_series=dict(self._anomaly_series),
                firing=dict(self._firing),
                thresholds=self._thresholds,
                skipped_steps=self._skipped,
                replica_hashes=tuple(self._replica_hashes.values()),
            )

    def _kinds(self, plan: NamedPlan) -> tuple[str, ...]:
        """Return the kinds of `plan` in the order of the plan, so that the page has the same order in each process."""
        kinds = self._kinds_of_plan.get(plan.hash)
        if kinds is None:
            kinds = tuple(dict.fromkeys(str(entry.kind) for entry in plan.plan.entries))
            used = {statistics.plan.hash for _, statistics in self._latest.values()}
            self._kinds_of_plan = {name: self._kinds_of_plan[name] for name in used} | {plan.hash: kinds}
            for kind in kinds:
                self._announce(kind)
        return kinds

    def _announce(self, kind: str) -> None:
        for rule in self._rules:
            ops = _TENSOR_OPS if kind else ("value",)
            if any(rule.judges(kind or None, op) for op in ops):
                self._anomalies.setdefault((rule.name, kind), 0)
                self._firing.setdefault((rule.name, kind), False)

    def _store_scalar(self, scalar: Scalar) -> None:
        key = (scalar.name, tuple(sorted(scalar.labels.items())))
        if key in self._scalars or len(self._scalars) < MAX_SCALAR_SERIES:
            self._scalars[key] = scalar
        elif len(self._scalars_left_out) < MAX_SCALAR_SERIES:  # limited; the page needs no exact number
            self._scalars_left_out.add(key)

    def _count(self, event: Event) -> None:
        if event.type == EventType.STEP_SKIPPED:
            self._skipped += 1
        if event.type != EventType.ANOMALY or event.rule is None:
            return
        pair = (event.rule, event.kind or NO_KIND)
        self._anomalies[pair] = self._anomalies.get(pair, 0) + 1
        self._fired_at[pair] = self._clock()
        self._firing.setdefault(pair, False)
        series = (*pair, event.tensor or "", event.op or "")
        if series not in self._anomaly_series and len(self._anomaly_series) >= MAX_ANOMALY_SERIES:
            series = (*pair, OTHER_TENSOR, event.op or "")
        self._anomaly_series[series] = self._anomaly_series.get(series, 0) + 1


def _by_record(latest: Mapping[str, tuple[int | None, Statistics]]) -> tuple[Sampled, ...]:
    """Group the kinds by the record that contains their latest statistics, and return one element per record."""
    kinds: dict[int, list[str]] = {}
    found: dict[int, tuple[int | None, Statistics]] = {}
    for kind, (step, statistics) in latest.items():
        kinds.setdefault(id(statistics), []).append(kind)
        found[id(statistics)] = (step, statistics)
    return tuple(Sampled(*found[key], frozenset(kinds[key])) for key in found)


def _limit(rule: AnomalyRule) -> float:
    limit = rule.limit()
    return math.nan if limit is None else limit
