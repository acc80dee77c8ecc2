"""The rules over all series of a rank at once. Equal, bit for bit, to `rankscope_contract.evaluate` series by series.

Runs on the publisher thread, on the CPU, and holds the only state rules have: one float32 baseline for each series.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from rankscope_contract.evaluate import EMA_KEEP, EMA_TAKE, SeriesEvaluator
from rankscope_contract.events import causal_micro_step, causal_stage
from rankscope_contract.kinds import CAUSAL_STAGE, COUNT_OPS, JUDGED_OPS, VALUE_OPS
from rankscope_contract.records import PlanEntry
from rankscope_contract.rules import AnomalyRule
from rankscope_exporter.statistics import Finished

_CPU: Final = torch.device("cpu")  # always named: a script may have set another default device
_COUNTS_JUDGED: Final = ("nans", "infs")
_OPS: Final = (*_COUNTS_JUDGED, *VALUE_OPS)
"""Every statistic that a rule may judge, in the order in which firings of one entry are listed."""

_JUDGED_ROWS: Final = [VALUE_OPS.index(op) for op in JUDGED_OPS]
_NO_BASELINE: Final = torch.tensor(math.nan, dtype=torch.float64, device=_CPU)
_STAGES: Final = 1 + max(CAUSAL_STAGE.values())
_MOST_MICRO_STEPS: Final = 1 << 20  # as a number beside stage and call that float64 still tells apart


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
class Judgement:
    """The verdict on one step."""

    baselines: torch.Tensor  # float32 [len(JUDGED_OPS), T]: what each value was compared with, NaN where nothing
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
    mask: torch.Tensor | None  # bool [T]; None means all of them


class Judge:
    """Keeps the baselines of the entries of a plan, which may grow, and judges step after step."""

    def __init__(self, rules: Sequence[AnomalyRule], entries: Sequence[PlanEntry] = (), *, limit: int = 64) -> None:
        self._rules = tuple(rules)
        self._limit = limit
        self._kinds: list[str] = []
        self._kind_of_entry = torch.zeros(0, dtype=torch.int64, device=_CPU)
        self._moment_of_entry = torch.zeros(0, dtype=torch.float64, device=_CPU)
        self._owner_of_entry = torch.zeros(0, dtype=torch.int64, device=_CPU)
        self._scopes: dict[str, tuple[_Scope, ...]] = {}
        self._baselines = torch.full((len(JUDGED_OPS), 0), math.nan, dtype=torch.float32, device=_CPU)
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
        kinds = torch.tensor([place[entry.kind] for entry in added], dtype=torch.int64, device=_CPU)
        moments = torch.tensor([_moment(entry) for entry in added], dtype=torch.float64, device=_CPU)
        own = [-1] * len(added) if owners is None else list(owners[known:])
        self._kind_of_entry = torch.cat([self._kind_of_entry, kinds])
        self._moment_of_entry = torch.cat([self._moment_of_entry, moments])
        self._owner_of_entry = torch.cat([self._owner_of_entry, torch.tensor(own, dtype=torch.int64, device=_CPU)])
        fresh = torch.full((len(JUDGED_OPS), len(added)), math.nan, dtype=torch.float32, device=_CPU)
        self._baselines = torch.cat([self._baselines, fresh], dim=1)
        self._scopes = {op: self._scopes_of(op) for op in _OPS}

    def observe(self, finished: Finished, call_order: Sequence[int] = ()) -> Judgement:
        """Judge one step and move the baselines on. Absent entries and null values leave their baseline alone.

        `call_order` says of each parameter when its gradient arrived (-1: not at all). What belongs to no parameter was
        called in the order in which it entered the plan.
        """
        with torch.inference_mode(False), torch.no_grad():
            before, against = self._advance(finished)
            verdicts = self._verdicts(finished, against)
            shown = against.masked_fill(~finished.present, math.nan)
            if not any(bool(fires.any()) for _, fires in verdicts.values()):
                return Judgement(shown)
            calls = self._calls(call_order)
            firings, left_out = self._firings(finished, before, verdicts, calls)
            order = {firing.entry: int(calls[firing.entry]) for firing in firings}
            return Judgement(shown, firings, left_out, self._firing(verdicts), order)

    def judge_scalar(self, name: str, value: float) -> AnomalyRule | None:
        """Return the rule that fires on this observation of the scalar `name`."""
        series = self._scalars.get(name)
        if series is None and len(self._scalars) >= MAX_SCALARS:
            return None
        if series is None:
            series = self._scalars[name] = SeriesEvaluator(self._rules, None, "value")
        firing = series.observe(value)
        return None if firing is None else firing.rule

    def _advance(self, finished: Finished) -> tuple[torch.Tensor, torch.Tensor]:
        """Move the baselines on; return them as they were, and what the values are to be compared with."""
        before = self._baselines
        values = finished.values[_JUDGED_ROWS]
        magnitude = values.abs().double()
        # Two products and a sum, as the reference has them: a fused multiply-add would round differently.
        moved = (before.double().mul_(EMA_KEEP)).add_(magnitude.mul(EMA_TAKE)).to(torch.float32)
        first = before.isnan()
        seen = values.isfinite().logical_and_(finished.present)
        after = torch.where(first, values.abs(), moved)
        self._baselines = torch.where(seen, after, before)
        return before, torch.where(first, self._baselines, before)

    def _scopes_of(self, op: str) -> tuple[_Scope, ...]:
        scopes = []
        for order, rule in enumerate(self._rules):
            judged = torch.tensor([rule.judges(kind, op) for kind in self._kinds], dtype=torch.bool, device=_CPU)
            if judged.any():
                scopes.append(_Scope(rule, order, None if judged.all() else judged[self._kind_of_entry]))
        return tuple(scopes)

    def _verdicts(
        self, finished: Finished, against: torch.Tensor
    ) -> dict[tuple[str, int], tuple[_Scope, torch.Tensor]]:
        """Return, for each (op, rule), on which entries the rule fires by itself."""
        verdicts = {}
        for op, scopes in self._scopes.items():
            if not scopes:
                continue
            if op in _COUNTS_JUDGED:
                value = finished.counts[COUNT_OPS.index(op)]
            else:
                value = finished.values[VALUE_OPS.index(op)].double()
            baseline = against[JUDGED_OPS.index(op)].double() if op in JUDGED_OPS else _NO_BASELINE
            exists = finished.present if op in _COUNTS_JUDGED else finished.present & ~value.isnan()
            for scope in scopes:
                fires = scope.rule.fires(op, value, baseline) & exists
                verdicts[op, scope.order] = scope, fires if scope.mask is None else fires & scope.mask
        return verdicts

    def _firings(
        self,
        finished: Finished,
        before: torch.Tensor,
        verdicts: dict[tuple[str, int], tuple[_Scope, torch.Tensor]],
        calls: torch.Tensor,
    ) -> tuple[tuple[Firing, ...], int]:
        """Return the first rule that fires for each (entry, op); NaN and Inf of one entry are one firing."""
        nobody = len(self._rules)
        winner = torch.full((len(finished.present), len(_OPS)), nobody, dtype=torch.int64, device=_CPU)
        for (op, order), (_, fires) in verdicts.items():
            column = winner[:, _OPS.index(op)]
            column.copy_(torch.where(fires, column.clamp(max=order), column))
        nans, infs = winner[:, 0], winner[:, 1]
        infs.masked_fill_(nans < nobody, nobody)
        places = (winner < nobody).nonzero()
        # What is cut off must be effects: one NaN loss makes every kind of every tensor fire, the gradients first.
        places = places[torch.argsort(self._causal_rank(places[:, 0], calls), stable=True)]
        firings = tuple(
            self._firing_at(finished, before, entry, _OPS[column], self._rules[int(winner[entry, column])])
            for entry, column in places[: self._limit].tolist()
        )
        return firings, max(0, len(places) - self._limit)

    def _calls(self, call_order: Sequence[int]) -> torch.Tensor:
        """Return for each entry when its tensor was seen within its stage; -1 where that is not known."""
        count = len(self._owner_of_entry)
        own = torch.arange(count, dtype=torch.int64, device=_CPU)
        if not call_order:
            return torch.where(self._owner_of_entry >= 0, -1, own)
        seen = torch.tensor(call_order, dtype=torch.int64, device=_CPU)
        return torch.where(self._owner_of_entry >= 0, seen[self._owner_of_entry.clamp(min=0)], own)

    def _causal_rank(self, entries: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
        last = int(calls.max()) + 1  # what was not seen comes behind what was
        order = torch.where(calls < 0, last, calls)[entries].double()
        return self._moment_of_entry[entries] * (last + 1) + order

    def _firing_at(self, finished: Finished, before: torch.Tensor, entry: int, op: str, rule: AnomalyRule) -> Firing:
        if op in _COUNTS_JUDGED:
            value = float(finished.counts[COUNT_OPS.index(op), entry])
        else:
            value = float(finished.values[VALUE_OPS.index(op), entry])
        baseline = float(before[JUDGED_OPS.index(op), entry]) if op in JUDGED_OPS else math.nan
        return Firing(entry, op, rule, value, _known(baseline), rule.limit())

    def _firing(self, verdicts: dict[tuple[str, int], tuple[_Scope, torch.Tensor]]) -> frozenset[tuple[str, str]]:
        pairs = set()
        for scope, fires in verdicts.values():
            for kind in torch.unique(self._kind_of_entry[fires]).tolist():
                pairs.add((scope.rule.name, self._kinds[kind]))
        return frozenset(pairs)


def _moment(entry: PlanEntry) -> float:
    """Return when in the step the tensor of an entry is seen, as `causal_key` has it: micro-batch, then stage."""
    stage = causal_stage(entry.kind)
    return min(causal_micro_step(entry.micro_step, stage), _MOST_MICRO_STEPS) * _STAGES + stage


def _known(baseline: float) -> float | None:
    return None if math.isnan(baseline) else baseline
