"""The latest values of a rank, and the `/metrics` page that shows them.

The values are collected from each record when it is published. All values of a kind come from one record, so the page
never combines values of two steps. For each group of replicas, the page has one number that combines the hashes of all
tensors. Ranks of the group show the same number while their tensors are equal.

The package prometheus_client renders a few dozen metric families, and pyarrow renders the statistics of tensors,
without the GIL. With prometheus_client, a hundred samples are cheap. For tens of thousands of samples, it would hold
the GIL and delay the training.

The part of a line before the value is built once per plan. Each step then costs only the selection, conversion and
insertion of the values. Labels distinguish the parts of a tensor, as `layers.0[1]`, but not micro-batches, calls or
model chunks. Two samples of one series would make the page invalid, so only one of them is on the page. The record
channel contains all of them.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from numbers import Real
from types import SimpleNamespace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from rankscope_contract import SCHEMA_VERSION, __version__
from rankscope_contract.metrics import catalogue
from rankscope_contract.metrics.catalogue import TENSOR_BASELINE, TENSOR_VALUE, MetricSpec
from rankscope_contract.model.events import Event, EventType
from rankscope_contract.model.identity import Identity
from rankscope_contract.model.kinds import COUNT_OPS, JUDGED_OPS, VALUE_OPS
from rankscope_contract.model.schema import Plan, PlanEntry
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.score import RULE_SCORE, STATE_LOADED
from rankscope_contract.wire.escaping import label_value
from rankscope_exporter.process.threads import no_fork
from rankscope_exporter.records.plan import NamedPlan
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
SCORE_SECONDS: Final = 60.0
"""The page shows the largest score of a rule for at least this time, so that each scrape of a minute sees it."""

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
    rule_scores: dict[str, dict[int, float]] = field(default_factory=dict)  # by rule, then by minute
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
        self._lock = threading.RLock()
        self._now = Snapshot()
        self._announced: set[str] = set()
        self.announce((NO_KIND,))

    def announce(self, kinds: Iterable[str]) -> None:
        """Add anomaly counters with value 0 of each kind and its rules, before the first record with these kinds."""
        with self._lock:
            for kind in kinds:
                if kind in self._announced:
                    continue
                self._announced.add(kind)
                ops = _TENSOR_OPS if kind else ("value",)
                for rule in self._rules:
                    if any(rule.judges(kind or None, op) for op in ops):
                        self._now.anomalies.setdefault((rule.name, kind), 0)
                        self._now.firing.setdefault((rule.name, kind), False)

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
                self.announce(kinds)
                now.statistics.update(dict.fromkeys(kinds, (record.step, record.statistics)))
                now.tensors_version += 1
            for scalar in record.scalars:
                if scalar.name == RULE_SCORE:
                    self._store_score(scalar.labels.get("rule", ""), scalar.value)
                elif scalar.name != STATE_LOADED:
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

    def _store_score(self, rule: str, score: float) -> None:
        """Store the largest score of this minute and of the one before."""
        minute, known = int(self._clock() / SCORE_SECONDS), self._now.rule_scores
        scores = known.get(rule, {})
        kept = {at: value for at, value in scores.items() if at >= minute - 1}
        known[rule] = kept | {minute: max(score, kept.get(minute, score))}

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


def distinct(entries: Sequence[PlanEntry], kinds: frozenset[str], last_micro_step: int | None) -> tuple[list[int], int]:
    """Select the plan entries for the metrics page.

    Return their positions, one per kind and label, and the number of omitted series.

    Of several entries with the same kind and label, one is selected. The following ones are preferred, in this order: a
    whole tensor to a part; a value of the whole step to one of a micro-batch; the last micro-batch; the first call of a
    module; the first entry of the plan. Other micro-batches and calls belong to the same series and do not count as
    omitted.
    """
    named: dict[tuple[str, str], list[int]] = {}
    for position, entry in enumerate(entries):
        micro_step = entry.micro_step
        is_later = micro_step is not None and (last_micro_step is None or micro_step > last_micro_step)
        if entry.kind in kinds and not is_later:
            named.setdefault((entry.kind, entry.label), []).append(position)

    def order(position: int) -> tuple[int, ...]:
        entry = entries[position]
        micro_step = 1 if entry.micro_step is None else -entry.micro_step
        return (entry.index is not None, entry.micro_step is not None, micro_step, entry.call_seq or 0, position)

    ambiguous = sum(
        len({(entries[position].index, entries[position].vpp_stage) for position in positions}) - 1
        for positions in named.values()
    )
    return sorted(min(positions, key=order) for positions in named.values()), ambiguous


_LAYOUTS_KEPT: Final = 8
_BASELINE_SUFFIX: Final = "_baseline"


@dataclass(frozen=True, slots=True)
class _Block:
    """Lines of one metric on the metrics page, before the values are inserted.

    Line i consists of `prefixes[i]` and of the element of the record's array of values at `positions[i]`.
    """

    prefixes: Any  # pa.StringArray
    positions: Any  # pa.Int32Array


@dataclass(frozen=True, slots=True)
class _PageLayout:
    values: _Block
    counts: _Block
    baselines: _Block
    series: int
    over_budget: int  # series above the limit `series_budget`
    ambiguous: int  # entries that have the same labels as another one


def _lines(block: _Block, numbers: Any) -> list[Any]:
    """Return the lines in `block` of the metrics page, with values from the array `numbers`.

    The result is one byte buffer with all lines, or no buffer. A null value has no line.
    """
    if not len(block.prefixes):
        return []
    lines = pc.binary_join_element_wise(block.prefixes, _texts(numbers.take(block.positions)), "\n", "")
    _, offsets, data = lines.buffers()
    return [] if data is None else [data.slice(0, memoryview(offsets).cast("i")[len(lines)])]


def _texts(numbers: Any) -> Any:
    """Return numbers in the text format of Prometheus.

    A float32 is converted to float64 first, so that the last bits of the value are zero and Prometheus compresses it
    well.
    """
    if pa.types.is_integer(numbers.type):
        return numbers.cast(pa.string())
    wide = numbers.cast(pa.float64())
    texts = wide.cast(pa.string())
    if pc.all(pc.is_finite(wide), min_count=0).as_py():
        return texts
    infinite = pc.if_else(pc.greater(wide, 0.0), "+Inf", "-Inf")
    return pc.if_else(pc.is_nan(wide), "NaN", pc.if_else(pc.is_inf(wide), infinite, texts))


def _family(spec: MetricSpec, lines: list[Any]) -> tuple[Any, ...]:
    if not lines:
        return ()
    return (f"# HELP {spec.name} {spec.help}\n# TYPE {spec.name} {spec.type}\n".encode(), *lines)


def _micro_steps(plan: NamedPlan, kinds: frozenset[str]) -> Any:
    return pa.array([entry.micro_step if entry.kind in kinds else None for entry in plan.plan.entries], pa.int32())


Samples = Iterable[tuple[tuple[str, ...], float]]
"""Samples of one metric family: for each sample, its value and its label values except those of `run` and `rank`."""

_PAGE_OWNED: Final = (catalogue.OVERHEAD_SECONDS, catalogue.SAMPLING_STRETCH)
"""Metrics with values from `ExporterStats`.

The metrics page leaves out logged scalars with the names of these metrics.
"""


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


@dataclass(eq=False)
class Exposition:
    """Renders the metrics page of one rank from its latest values.

    Any number of threads may call the method `pieces` at the same time.
    """

    identity: Identity
    latest: LatestValues
    stats: Callable[[], ExporterStats]
    rules: Sequence[AnomalyRule]
    series_budget: int
    all_ops: bool = False
    planned_steps: int | None = None
    device: str = ""

    def __post_init__(self) -> None:
        self._labels = (self.identity.run, str(self.identity.rank))
        limits = {rule.name: rule.limit() for rule in self.rules}
        self._thresholds = {name: math.nan if limit is None else limit for name, limit in limits.items()}
        facts = {**asdict(self.identity), "device": self.device}
        self._info = tuple(str(facts[label]) for label in catalogue.RUN_INFO.labels)
        named = zip(TENSOR_VALUE.all_labels, self._labels, strict=False)
        self._of_rank = "".join(f'{name}="{label_value(value)}",' for name, value in named)
        self._layout = lru_cache(_LAYOUTS_KEPT)(self._make_layout)
        self._micro_steps = lru_cache(_LAYOUTS_KEPT)(_micro_steps)
        self._rendering = threading.Lock()
        self._rendered_version = 0
        self._tensor_lines: tuple[Any, ...] = ()  # of this version
        self._most_left_out: dict[str, int] = {}

    def pieces(self) -> tuple[Any, ...]:
        """Return the metrics page as a sequence of byte buffers.

        All statistics of one kind of tensor come from the same record.
        """
        snapshot = self.latest.snapshot()
        with self._rendering:  # a second scrape of the same step waits for the first one and uses its lines
            if self._rendered_version < snapshot.tensors_version:
                self._tensor_lines = self._render(snapshot.tensors)
                self._rendered_version = snapshot.tensors_version
            lines = self._tensor_lines
        registry: Any = SimpleNamespace(collect=lambda: self._families(snapshot))  # of this page alone
        return (generate_latest(registry), *lines)

    @no_fork()
    def _render(self, tensors: Iterable[Sampled]) -> tuple[Any, ...]:
        """Return the lines of all statistics in `tensors`, grouped by metric family as the text format requires."""
        values: list[Any] = []
        baselines: list[Any] = []
        left_out = {"series_budget": 0, "series_ambiguous": 0}
        left = self.series_budget
        for sampled in tensors:
            statistics, plan = sampled.statistics, sampled.statistics.plan
            micro_steps = self._micro_steps(plan, sampled.kinds)
            # `numel` is always measured, although settings may exclude other ops. It is null for an absent entry.
            numel = statistics.counts.slice(plan.plan.count_ops.index("numel") * len(micro_steps), len(micro_steps))
            last = pc.max(micro_steps.filter(numel.is_valid())).as_py()
            layout = self._layout(plan, sampled.kinds, left, last)
            left -= layout.series
            left_out["series_budget"] += layout.over_budget
            left_out["series_ambiguous"] += layout.ambiguous
            values += _lines(layout.values, statistics.values) + _lines(layout.counts, statistics.counts)
            baselines += _lines(layout.baselines, statistics.values)
        # The maximum so far: a counter must not decrease, and a sum over all scrapes would count scrapes.
        self._most_left_out = {name: max(self._most_left_out.get(name, 0), n) for name, n in left_out.items()}
        return (*_family(TENSOR_VALUE, values), *_family(TENSOR_BASELINE, baselines))

    def _make_layout(self, plan: NamedPlan, kinds: frozenset[str], budget: int, last: int | None) -> _PageLayout:
        entries = plan.plan.entries
        shown, ambiguous = distinct(entries, kinds, last)
        # In the order of tensors, so that the limit leaves out whole tensors instead of one statistic of all tensors.
        wanted = [(position, op) for position in shown for op in self._ops(plan.plan, str(entries[position].kind))]
        kept = wanted[:budget]

        def block(spec: MetricSpec, ops: tuple[str, ...], suffix: str = "") -> _Block:
            lines = [
                (self._prefix(spec, entries[position], op.removesuffix(suffix)), ops.index(op), position)
                for position, op in sorted(kept, key=lambda line: line[1])
                if op in ops and op.endswith(_BASELINE_SUFFIX) == bool(suffix)
            ]
            return _Block(
                pa.array([prefix for prefix, _, _ in lines], pa.string()),
                pa.array([op * len(entries) + position for _, op, position in lines], pa.int32()),
            )

        return _PageLayout(
            block(TENSOR_VALUE, plan.plan.value_ops),
            block(TENSOR_VALUE, plan.plan.count_ops),
            block(TENSOR_BASELINE, plan.plan.value_ops, _BASELINE_SUFFIX),
            series=len(kept),
            over_budget=len(wanted) - len(kept),
            ambiguous=ambiguous,
        )

    def _ops(self, plan: Plan, kind: str) -> list[str]:
        """Return the statistics of `plan` that the page shows for tensors of `kind`, and their baselines.

        Depending on the settings, these are all statistics or only those that rules use.
        """

        def is_shown(op: str) -> bool:
            return self.all_ops or op in JUDGED_OPS or any(rule.judges(kind, op) for rule in self.rules)

        carried = (op for op in (*plan.value_ops, *plan.count_ops) if not op.endswith(_BASELINE_SUFFIX))
        return [*filter(is_shown, carried), *(op + _BASELINE_SUFFIX for op in JUDGED_OPS)]

    def _prefix(self, spec: MetricSpec, entry: PlanEntry, op: str) -> str:
        own = f'kind="{label_value(str(entry.kind))}",tensor="{label_value(entry.label)}",op="{op}"'
        return f"{spec.name}{{{self._of_rank}{own}}} ".encode("utf-8", "replace").decode()

    def _families(self, snapshot: Snapshot) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        for spec, samples in self._samples(snapshot):
            make = CounterMetricFamily if spec.type == "counter" else GaugeMetricFamily
            family = make(spec.name, spec.help, labels=spec.all_labels)
            for labels, value in samples:
                family.add_metric([_utf8(label) for label in (*self._labels, *labels)], value)
            if family.samples:
                yield family

    def _samples(self, snapshot: Snapshot) -> Iterator[tuple[MetricSpec, Samples]]:
        stats = self.stats()
        torch = getattr(sys.modules.get("torch"), "__version__", "")
        dropped = dict(stats.dropped)
        for reason, left_out in self._most_left_out.items():
            dropped[reason] = dropped.get(reason, 0) + left_out
        dropped["series_budget"] = dropped.get("series_budget", 0) + snapshot.left_out
        yield catalogue.BUILD_INFO, [((__version__, str(SCHEMA_VERSION), str(torch)), 1.0)]
        yield catalogue.RUN_INFO, [(self._info, 1.0)]
        yield catalogue.STEP, _one(snapshot.step)
        yield catalogue.STEPS_PLANNED, _one(self.planned_steps)
        steps = {kind: sampled.step for sampled in snapshot.tensors for kind in sorted(sampled.kinds)}
        yield catalogue.KIND_STEP, _by_name({kind: step for kind, step in steps.items() if step is not None})
        yield catalogue.FEATURE_VALUE, snapshot.features.items()
        yield catalogue.SKIPPED_STEPS, _one(snapshot.skipped_steps)
        yield catalogue.RULE_THRESHOLD, _by_name(self._thresholds)
        minute = int(snapshot.taken_at / SCORE_SECONDS)
        scores = {
            name: [score for at, score in known.items() if at >= minute - 1]
            for name, known in snapshot.rule_scores.items()
        }
        yield catalogue.RULE_SCORE, _by_name({name: max(recent) for name, recent in scores.items() if recent})
        yield catalogue.RULE_FIRING, snapshot.firing.items()
        yield catalogue.ANOMALY_EVENTS, snapshot.anomalies.items()
        yield catalogue.ANOMALY_AGE, [(pair, snapshot.taken_at - at) for pair, at in snapshot.fired_at.items()]
        yield catalogue.TENSOR_ANOMALY_EVENTS, snapshot.anomaly_series.items()
        hashes = snapshot.replica_hashes
        yield catalogue.REPLICA_HASH, _by_name({replicas: value for replicas, (_, value) in hashes.items()})
        hash_steps = {replicas: step for replicas, (step, _) in hashes.items() if step is not None}
        yield catalogue.REPLICA_HASH_STEP, _by_name(hash_steps)
        yield from _scalar_samples(snapshot.scalars)
        yield catalogue.OVERHEAD_SECONDS, _by_name(stats.overhead_seconds)
        yield catalogue.SAMPLING_STRETCH, _one(stats.sampling_stretch)
        yield catalogue.COLLECTIVE_CALLS, [((op,), calls) for op, (calls, _) in stats.collectives.items()]
        yield catalogue.COLLECTIVE_BYTES, [((op,), total) for op, (_, total) in stats.collectives.items()]
        yield catalogue.FAULTS, _one(stats.faults)
        yield catalogue.DROPPED, _by_name(dropped)
        yield catalogue.RING_RECORDS, _one(stats.ring_records)
        yield catalogue.RING_UNCOMMITTED, _one(stats.ring_uncommitted)


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
