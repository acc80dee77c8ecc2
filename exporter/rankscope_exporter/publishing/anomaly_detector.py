"""Evaluate the rules for all series of a rank together.

The result is equal, bit for bit, to `rankscope_contract.rules.reference`, which evaluates one series at a time.

Runs on the publisher thread, with numpy, and holds the only state rules have: one float32 baseline for each series.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rankscope_contract.model.events import causal_micro_step, causal_stage
from rankscope_contract.model.kinds import CAUSAL_STAGE, COUNT_OPS, JUDGED_OPS, VALUE_OPS
from rankscope_contract.model.schema import PlanEntry
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.reference import EMA_KEEP, EMA_TAKE, SeriesEvaluator
from rankscope_exporter.statistics import Finished

_COUNTS_JUDGED: Final = ("nans", "infs")
_OPS: Final = (*_COUNTS_JUDGED, *VALUE_OPS)
"""Every statistic that a rule may judge, in the order in which firings of one entry are listed."""

_JUDGED_ROWS: Final = [VALUE_OPS.index(op) for op in JUDGED_OPS]
_NO_BASELINE: Final = np.array(math.nan, np.float64)
_STAGES: Final = 1 + max(CAUSAL_STAGE.values())
_MOST_MICRO_STEPS: Final = 1 << 20  # as a number beside stage and call that float64 still tells apart


Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

MAX_SCALARS: Final = 1000
"""Scalar names that are judged; a script that makes up names without end must not fill the memory."""


class Firing(NamedTuple):
    """A statistic of an entry on which a rule fired."""

    entry: int
    op: str
    rule: AnomalyRule
    value: float
    baseline: float | None  # before this observation; None at the first one and where the statistic keeps none
    threshold: float | None


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """The verdict on one step."""

    baselines: Float32s  # [len(JUDGED_OPS), T]: what each value was compared with, NaN where nothing
    firings: tuple[Firing, ...] = ()  # in causal order of micro-batch and kind, then by call
    left_out: int = 0  # firings beyond the limit
    firing: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    """(rule, kind) of every rule that fires by itself, whether or not it names the alert: PromQL says the same."""
    calls: Mapping[int, int] = field(default_factory=dict)
    """By entry that fired: when what it belongs to was called within the step."""

    def call_order(self, entry: int) -> int | None:
        """Return when within the step the tensor of `entry` was seen; None when that is not known."""
        order = self.calls.get(entry, -1)
        return None if order < 0 else order


@dataclass(frozen=True, slots=True)
class _Scope:
    """Which entries a rule judges by one statistic."""

    rule: AnomalyRule
    order: int
    mask: Bools | None  # [T]; None means all of them


class AnomalyDetector:
    """Keeps the baselines of the entries of a plan, which may grow, and judges step after step."""

    def __init__(self, rules: Sequence[AnomalyRule], entries: Sequence[PlanEntry] = (), *, limit: int = 64) -> None:
        self._rules = tuple(rules)
        self._limit = limit
        self._kinds: list[str] = []
        self._kind_of_entry = np.empty(0, np.int64)
        self._moment_of_entry = np.empty(0, np.float64)
        self._owner_of_entry = np.empty(0, np.int64)
        self._scopes: dict[str, tuple[_Scope, ...]] = {}
        self._baselines = np.empty((len(JUDGED_OPS), 0), np.float32)
        self._scalars: dict[str, SeriesEvaluator] = {}
        self.extend(entries)

    def extend(self, entries: Sequence[PlanEntry], owners: Sequence[int] | None = None) -> None:
        """Take over the whole plan as it is now: entries known before stand at the beginning, unchanged.

        `owners` says of each entry which parameter it belongs to, -1 for none; without it, none does.
        """
        known = len(self._kind_of_entry)
        if len(entries) == known and self._scopes:
            return
        added = entries[known:]
        self._kinds += sorted({entry.kind for entry in added} - set(self._kinds))
        place = {kind: index for index, kind in enumerate(self._kinds)}
        kinds = np.array([place[entry.kind] for entry in added], np.int64)
        step_events = np.array([_moment(entry) for entry in added], np.float64)
        own = np.array([-1] * len(added) if owners is None else owners[known:], np.int64)
        self._kind_of_entry = np.concatenate([self._kind_of_entry, kinds])
        self._moment_of_entry = np.concatenate([self._moment_of_entry, step_events])
        self._owner_of_entry = np.concatenate([self._owner_of_entry, own])
        fresh = np.full((len(JUDGED_OPS), len(added)), math.nan, np.float32)
        self._baselines = np.concatenate([self._baselines, fresh], axis=1)
        self._scopes = {op: self._scopes_of(op) for op in _OPS}

    def observe(self, finished: Finished, call_order: Sequence[int] = ()) -> StepVerdict:
        """Judge one step and move the baselines on. Absent entries and null values leave their baseline alone.

        `call_order` says of each parameter when its gradient arrived (-1: not at all). What belongs to no parameter was
        called in the order in which it entered the plan.
        """
        with np.errstate(all="ignore"):  # products with Inf and NaN are meant
            before, against = self._advance(finished)
            verdicts = self._verdicts(finished, against)
            shown = np.where(finished.present, against, np.float32(math.nan))
            if not any(bool(fires.any()) for _, fires in verdicts.values()):
                return StepVerdict(shown)
            calls = self._calls(call_order)
            firings, left_out = self._firings(finished, before, verdicts, calls)
            order = {firing.entry: int(calls[firing.entry]) for firing in firings}
            return StepVerdict(shown, firings, left_out, self._firing(verdicts), order)

    def check_scalar(self, name: str, value: float) -> AnomalyRule | None:
        """Return the rule that fires on this observation of the scalar `name`."""
        series = self._scalars.get(name)
        if series is None and len(self._scalars) >= MAX_SCALARS:
            return None
        if series is None:
            series = self._scalars[name] = SeriesEvaluator(self._rules, None, "value")
        firing = series.observe(value)
        return None if firing is None else firing.rule

    def _advance(self, finished: Finished) -> tuple[Float32s, Float32s]:
        """Move the baselines on; return them as they were, and what the values are to be compared with."""
        before = self._baselines
        values = finished.values[_JUDGED_ROWS]
        magnitude = np.abs(values)
        # Two products and a sum in float64, as the reference has them: a fused multiply-add would round differently.
        kept, taken = EMA_KEEP * before.astype(np.float64), EMA_TAKE * magnitude.astype(np.float64)
        moved = (kept + taken).astype(np.float32)
        first = np.isnan(before)
        seen = np.isfinite(values) & finished.present
        self._baselines = np.where(seen, np.where(first, magnitude, moved), before)
        return before, np.where(first, self._baselines, before)

    def _scopes_of(self, op: str) -> tuple[_Scope, ...]:
        scopes = []
        for order, rule in enumerate(self._rules):
            judged = np.array([rule.judges(kind, op) for kind in self._kinds], np.bool_)
            if judged.any():
                scopes.append(_Scope(rule, order, None if judged.all() else judged[self._kind_of_entry]))
        return tuple(scopes)

    def _verdicts(self, finished: Finished, against: Float32s) -> dict[tuple[str, int], tuple[_Scope, Bools]]:
        """Return, for each (op, rule), on which entries the rule fires by itself."""
        verdicts = {}
        value: npt.NDArray[Any]
        for op, scopes in self._scopes.items():
            if not scopes:
                continue
            if op in _COUNTS_JUDGED:
                value = finished.counts[COUNT_OPS.index(op)]
            else:
                value = finished.values[VALUE_OPS.index(op)].astype(np.float64)
            baseline = against[JUDGED_OPS.index(op)].astype(np.float64) if op in JUDGED_OPS else _NO_BASELINE
            exists = finished.present if op in _COUNTS_JUDGED else finished.present & ~np.isnan(value)
            for scope in scopes:
                fires = scope.rule.fires(op, value, baseline) & exists
                verdicts[op, scope.order] = scope, fires if scope.mask is None else fires & scope.mask
        return verdicts

    def _firings(
        self,
        finished: Finished,
        before: Float32s,
        verdicts: dict[tuple[str, int], tuple[_Scope, Bools]],
        calls: Integers,
    ) -> tuple[tuple[Firing, ...], int]:
        """Return the first rule that fires for each (entry, op); NaN and Inf of one entry are one firing."""
        nobody = len(self._rules)
        winner = np.full((len(finished.present), len(_OPS)), nobody, np.int64)
        for (op, order), (_, fires) in verdicts.items():
            column = winner[:, _OPS.index(op)]
            column[fires] = np.minimum(column[fires], order)
        nans, infs = winner[:, 0], winner[:, 1]
        infs[nans < nobody] = nobody
        places = np.argwhere(winner < nobody)
        # What is cut off must be effects: one NaN loss makes every kind of every tensor fire, the gradients first.
        places = places[np.argsort(self._causal_rank(places[:, 0], calls), kind="stable")]
        firings = tuple(
            self._firing_at(finished, before, entry, _OPS[column], self._rules[int(winner[entry, column])])
            for entry, column in places[: self._limit].tolist()
        )
        return firings, max(0, len(places) - self._limit)

    def _calls(self, call_order: Sequence[int]) -> Integers:
        """Return for each entry when its tensor was seen within its stage; -1 where that is not known."""
        own = np.arange(len(self._owner_of_entry), dtype=np.int64)
        if not call_order:
            return np.where(self._owner_of_entry >= 0, np.int64(-1), own)
        seen = np.array(call_order, np.int64)
        return np.where(self._owner_of_entry >= 0, seen[self._owner_of_entry.clip(min=0)], own)

    def _causal_rank(self, entries: Integers, calls: Integers) -> npt.NDArray[np.float64]:
        last = int(calls.max()) + 1  # what was not seen comes behind what was
        order = np.where(calls < 0, last, calls)[entries]
        return self._moment_of_entry[entries] * (last + 1) + order

    def _firing_at(self, finished: Finished, before: Float32s, entry: int, op: str, rule: AnomalyRule) -> Firing:
        if op in _COUNTS_JUDGED:
            value = float(finished.counts[COUNT_OPS.index(op), entry])
        else:
            value = float(finished.values[VALUE_OPS.index(op), entry])
        baseline = float(before[JUDGED_OPS.index(op), entry]) if op in JUDGED_OPS else math.nan
        return Firing(entry, op, rule, value, _known(baseline), rule.limit())

    def _firing(self, verdicts: dict[tuple[str, int], tuple[_Scope, Bools]]) -> frozenset[tuple[str, str]]:
        pairs = set()
        for scope, fires in verdicts.values():
            for kind in np.unique(self._kind_of_entry[fires]).tolist():
                pairs.add((scope.rule.name, self._kinds[kind]))
        return frozenset(pairs)


def _moment(entry: PlanEntry) -> float:
    """Return when in the step the tensor of an entry is seen, as `causal_key` has it: micro-batch, then stage."""
    stage = causal_stage(entry.kind)
    return min(causal_micro_step(entry.micro_step, stage), _MOST_MICRO_STEPS) * _STAGES + stage


def _known(baseline: float) -> float | None:
    return None if math.isnan(baseline) else baseline
