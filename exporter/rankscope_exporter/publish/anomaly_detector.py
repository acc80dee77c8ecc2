"""Finds anomalies of a step and kinds of rows that are absent, on the publisher thread.

`AnomalyDetector` evaluates the anomaly rules for all series of a rank together, with numpy. The results are
bit-identical to `rankscope_contract.rules.curve`, which evaluates one series at a time. The only state of the rules is,
for each series, one float32 baseline and the number of values that the series still needs before it is evaluated.

`SilentKinds` publishes one notice for each kind of rows that is configured and absent.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rankscope_contract.model.events import Event, causal_key, causal_micro_step, causal_stage
from rankscope_contract.model.kinds import CAUSAL_STAGE, COUNT_OPS, GRADIENT_KINDS, JUDGED_OPS, VALUE_OPS, Kind
from rankscope_contract.model.schema import Plan, PlanEntry
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.curve import EMA_KEEP, EMA_TAKE, Firing, SeriesEvaluator, needed_values
from rankscope_contract.rules.score import ScoreRule
from rankscope_exporter.records.plan import Finished
from rankscope_exporter.records.record import OF_MICRO_BATCHES, ExpectedRows

_COUNTS_JUDGED: Final = ("nans", "infs")
_OPS: Final = (*_COUNTS_JUDGED, *VALUE_OPS)
"""All statistics that a rule can evaluate.

If several statistics of one plan entry have firings, the firings are sorted in the order of this tuple.
"""

_UNSEEN: Final = -1  # an entry without a value so far
_NUMBER_AT_FIRST: Final = 1
_INTENDED: Final[dict[str, int]] = {
    **dict.fromkeys((Kind.PARAM_BEFORE, Kind.PARAM_AFTER), _NUMBER_AT_FIRST),
    **dict.fromkeys((Kind.ACT_IN, Kind.ACT_OUT), 1 << 62),  # any number
}
"""The number of infinities that are no anomaly, by kind, in an entry that has some at its first value."""

_JUDGED_ROWS: Final = [VALUE_OPS.index(op) for op in JUDGED_OPS]
_NO_BASELINE: Final = np.array(math.nan, np.float64)
_STAGES: Final = 1 + max(CAUSAL_STAGE.values())
_MOST_MICRO_STEPS: Final = 1 << 20  # float64 can represent micro-batch, stage and call order in one number


Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

MAX_SCALARS: Final = 1000
"""Largest number of combinations of scalar name and labels for which rules are evaluated.

This number limits the memory if a script creates new names without end.
"""


class EntryFiring(NamedTuple):
    """A firing: one statistic of one plan entry, and the rule that holds for its value."""

    entry: int
    op: str
    rule: AnomalyRule
    value: float
    baseline: float | None  # before this observation; None at the first one, and for statistics without a baseline
    numel: int
    call_id: int | None
    """Number by which firings with equal micro-batch and kind are sorted.

    For an entry with a parameter, it is the place of the parameter's gradient in the order in which gradients arrived;
    None if it is unknown. For an entry without a parameter, it is the position of the entry in the plan.
    """


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """The result of evaluating all rules at one step."""

    baselines: Float32s  # [len(JUDGED_OPS), T]: the values compared with, NaN if there is none
    firings: tuple[EntryFiring, ...] = ()  # in causal order: micro-batch, kind, call
    left_out: int = 0  # firings beyond the limit
    firing: frozenset[tuple[str, str]] = frozenset()
    """The pair (rule, kind) of every rule that holds for at least one entry of the kind.

    If several rules hold for one statistic, only the first of them gives an event, but all of them are in this set. The
    PromQL forms of the rules give the same pairs.
    """


class AnomalyDetector:
    """Stores the baselines of all plan entries, and evaluates the rules for one step at a time. The plan may change."""

    def __init__(
        self,
        rules: Sequence[AnomalyRule],
        entries: Sequence[PlanEntry] = (),
        *,
        limit: int = 64,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Use `rules`. With `tell`, infinities of an entry from its first value on are no anomaly, and are named once.

        A step has at most `limit` firings.
        """
        self._rules = tuple(rule for rule in rules if not isinstance(rule, ScoreRule))
        self._limit = limit
        self._tell = tell
        self._has_told = False
        self._intended = np.empty(0, np.int64)  # number of infinities of each entry that are no anomaly
        self._judged: dict[str, list[tuple[int, Bools]]] = {}
        """By op: the positions of the rules that evaluate it, each with a mask [T] of the entries that it evaluates."""
        self._baselines = np.empty((len(JUDGED_OPS), 0), np.float32)
        self._missing_values = np.empty((len(JUDGED_OPS), 0), np.int64)
        self._scalars: dict[tuple[str, str | None], SeriesEvaluator] = {}
        self.entries: Sequence[PlanEntry] = ()
        """The entries of the plan of the latest step."""
        self.follow(entries)

    def follow(self, entries: Sequence[PlanEntry], owners: Sequence[int] | None = None) -> None:
        """Use the plan with `entries` from now on. Series that the new plan does not contain lose their baselines.

        For each entry, `owners` has the position of the parameter of the entry, -1 for an entry without a parameter. A
        position counts in the list of all parameters of the model. If `owners` is None, no entry has a parameter.
        """
        if entries is self.entries and self._judged:
            return
        column = {entry.series: place for place, entry in enumerate(self.entries)}
        before = np.array([column.get(entry.series, -1) for entry in entries], np.int64)
        self.entries = entries
        kinds, self._kind_of_entry = np.unique(np.array([entry.kind for entry in entries], str), return_inverse=True)
        self._kinds: list[str] = kinds.tolist()
        self._position_of_entry = np.array([_position(entry.kind, entry.micro_step) for entry in entries], np.float64)
        self._owner_of_entry = np.array([-1] * len(entries) if owners is None else owners, np.int64)
        needed = [[needed_values(self._rules, kind, op) for op in JUDGED_OPS] for kind in self._kinds]
        fresh = np.array(needed, np.int64).reshape(-1, len(JUDGED_OPS))[self._kind_of_entry].T
        self._missing_values = _carried(self._missing_values, before, fresh)
        self._baselines = _carried(
            self._baselines, before, np.full((len(JUDGED_OPS), len(entries)), math.nan, np.float32)
        )
        self._intended = _carried(self._intended[np.newaxis], before, np.full((1, len(entries)), _UNSEEN))[0]
        self._judged = {op: self._judging(op) for op in _OPS}

    def observe(self, finished: Finished, arrived: Sequence[int] = ()) -> StepVerdict:
        """Evaluate the rules for the statistics of one step, and update the baselines. Return the result.

        A plan entry without a value at this step does not change its baseline. `arrived` has the position of the
        parameter of each gradient in the order in which they arrived. Entries without a parameter are sorted by their
        position in the plan.
        """
        with np.errstate(all="ignore"):  # products with Inf and NaN are intended
            before, against = self._advance(finished)
            verdicts = self._verdicts(finished, against, self._find_intended(finished))
            shown = np.where(finished.present, against, np.float32(math.nan))
            if not verdicts:
                return StepVerdict(shown)
            firings, left_out = self._firings(finished, before, verdicts, self._calls(arrived))
            pairs = frozenset(
                (self._rules[order].name, self._kinds[kind])
                for (_, order), fires in verdicts.items()
                for kind in np.unique(self._kind_of_entry[fires]).tolist()
            )
            return StepVerdict(shown, firings, left_out, pairs)

    def check_scalar(self, name: str, value: float, labels: str | None = None) -> Firing | None:
        """Return the firing of the first rule that holds for `value`, a value of the scalar `name`; None without one.

        `labels` is the text of the labels. Each combination of name and labels has its own baseline.
        """
        series = self._scalars.get((name, labels))
        if series is None and len(self._scalars) >= MAX_SCALARS:
            return None
        if series is None:
            series = self._scalars[name, labels] = SeriesEvaluator(self._rules, None, "value", name)
        return series.observe(value)

    def _advance(self, finished: Finished) -> tuple[Float32s, Float32s]:
        """Update the baselines with the statistics of a step. Return two arrays [len(JUDGED_OPS), entries].

        The first array has the baselines from before this step. The second array has the values with which the rules
        compare the statistics of this step. The two arrays differ only at the first observation of a series, which is
        compared with itself. For a series, both arrays contain NaN until the series has enough values for the rules.
        """
        before = self._baselines
        values = finished.values[_JUDGED_ROWS]
        magnitude = np.abs(values)
        # Two products and a sum in float64, as in the reference: a fused multiply-add would round differently.
        kept, taken = EMA_KEEP * before.astype(np.float64), EMA_TAKE * magnitude.astype(np.float64)
        moved = (kept + taken).astype(np.float32)
        first = np.isnan(before)
        seen = np.isfinite(values) & (values != 0) & finished.present
        self._baselines = np.where(seen, np.where(first, magnitude, moved), before)
        against = np.where(first, self._baselines, before)
        early = self._missing_values > 0
        self._missing_values -= seen
        return np.where(early, np.float32(math.nan), before), np.where(early, np.float32(math.nan), against)

    def _find_intended(self, finished: Finished) -> Integers:
        """Return the number of infinities of each entry that are no anomaly at this step, and store the next numbers.

        They are those that a parameter or an activation has from its first value on, as in an attention mask. A
        parameter keeps their number, and an activation may have any number of them later. Only the script changes a
        parameter without a gradient: the infinities of its last value are no anomaly.
        """
        nans, infs = (finished.counts[COUNT_OPS.index(op)] for op in _COUNTS_JUDGED)
        if self._tell is None or not (finished.present & (infs != self._intended)).any():
            return self._intended
        first = finished.present & (self._intended == _UNSEEN)
        of_kind = np.array([_INTENDED.get(kind, 0) for kind in self._kinds], np.int64)[self._kind_of_entry]
        found = np.where((nans == 0) & (infs > 0), np.where(of_kind == _NUMBER_AT_FIRST, infs, of_kind), 0)
        intended = np.where(first, found, self._intended)
        trained = self._owner_of_entry[finished.present & np.isin(self._kinds, GRADIENT_KINDS)[self._kind_of_entry]]
        # Without any gradient at this step, it is not known which parameters are trained.
        is_frozen = (of_kind == _NUMBER_AT_FIRST) & ~np.isin(self._owner_of_entry, trained) & (trained.size > 0)
        self._intended = np.where(finished.present & is_frozen, found, intended)
        names = dict.fromkeys(self.entries[entry].tensor for entry in np.flatnonzero(first & (found > 0)).tolist())
        if names and not self._has_told and self._judged["infs"]:
            self._has_told = True
            self._tell(
                f"infinities that tensors have from their first value on are no anomaly: {', '.join([*names][:3])}"
            )
        return intended

    def _judging(self, op: str) -> list[tuple[int, Bools]]:
        of_kinds = [np.array([rule.judges(kind, op) for kind in self._kinds], np.bool_) for rule in self._rules]
        return [(order, judged[self._kind_of_entry]) for order, judged in enumerate(of_kinds) if judged.any()]

    def _verdicts(self, finished: Finished, against: Float32s, intended: Integers) -> dict[tuple[str, int], Bools]:
        """Return a bool array [entries] for each op and rule: True for the plan entries for which the rule holds.

        The keys are pairs of an op and the position of a rule in the list of rules. Rules that hold for no entry are
        left out.
        """
        verdicts = {}
        value: npt.NDArray[Any]
        for op, judging in self._judged.items():
            if not judging:
                continue
            if op in _COUNTS_JUDGED:
                value = finished.counts[COUNT_OPS.index(op)]
                value = np.maximum(value - intended.clip(min=0), 0) if op == "infs" else value
            else:
                value = finished.values[VALUE_OPS.index(op)].astype(np.float64)
            baseline = against[JUDGED_OPS.index(op)].astype(np.float64) if op in JUDGED_OPS else _NO_BASELINE
            exists = finished.present if op in _COUNTS_JUDGED else finished.present & ~np.isnan(value)
            for order, mask in judging:
                fires = self._rules[order].fires(op, value, baseline) & exists & mask
                if fires.any():
                    verdicts[op, order] = fires
        return verdicts

    def _firings(
        self, finished: Finished, before: Float32s, verdicts: dict[tuple[str, int], Bools], calls: Integers
    ) -> tuple[tuple[EntryFiring, ...], int]:
        """Return at most `limit` firings of a step, and the number of the remaining firings, which are left out.

        The constructor receives `limit`. For each tensor and op, only the first rule that holds gives a firing. NaN and
        Inf of one entry count as one firing.
        """
        no_rule = len(self._rules)
        winner = np.full((len(finished.present), len(_OPS)), no_rule, np.int64)
        for (op, order), fires in verdicts.items():
            column = winner[:, _OPS.index(op)]
            column[fires] = np.minimum(column[fires], order)
        nans, infs = winner[:, 0], winner[:, 1]
        infs[nans < no_rule] = no_rule
        places = np.argwhere(winner < no_rule)
        # The limit must remove effects, not causes: one NaN loss causes firings of every kind of every tensor.
        last = int(calls.max()) + 1  # entries with an unknown position are last
        rank = self._position_of_entry * (last + 1) + np.where(calls < 0, last, calls)
        places = places[np.argsort(rank[places[:, 0]], kind="stable")]
        firings = tuple(
            self._firing_at(finished, before, calls, entry, op=_OPS[column], rule=self._rules[winner[entry, column]])
            for entry, column in places[: self._limit].tolist()
        )
        return firings, max(0, len(places) - self._limit)

    def _calls(self, arrived: Sequence[int]) -> Integers:
        """Return, for each plan entry, the number by which firings with equal micro-batch and kind are sorted.

        With a parameter, it is the place of its gradient in the order of arrival (-1: unknown), else that in the plan.
        """
        own = np.arange(len(self._owner_of_entry), dtype=np.int64)
        place = {parameter: number for number, parameter in enumerate(dict.fromkeys(arrived))}
        seen = np.array([place.get(owner, -1) for owner in self._owner_of_entry.tolist()], np.int64)
        return np.where(self._owner_of_entry >= 0, seen, own)

    def _firing_at(
        self, finished: Finished, before: Float32s, calls: Integers, entry: int, *, op: str, rule: AnomalyRule
    ) -> EntryFiring:
        if op in _COUNTS_JUDGED:
            value = float(finished.counts[COUNT_OPS.index(op), entry])
        else:
            value = float(finished.values[VALUE_OPS.index(op), entry])
        baseline = float(before[JUDGED_OPS.index(op), entry]) if op in JUDGED_OPS else math.nan
        numel, call = int(finished.counts[COUNT_OPS.index("numel"), entry]), int(calls[entry])
        known = None if math.isnan(baseline) else baseline
        return EntryFiring(entry, op, rule, value, known, numel, None if call < 0 else call)


def _carried(old: npt.NDArray[Any], before: Integers, fresh: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return `old` in the columns of the new plan: `before` has each entry's old column, or -1 to take `fresh`."""
    if not old.shape[1]:
        return fresh
    return np.where(before >= 0, old[:, before.clip(min=0)], fresh)


@functools.lru_cache
def _position(kind: str, micro_step: int | None) -> float:
    """Return a number that sorts the plan entries of one step by micro-batch, then by kind, from causes to effects."""
    stage = causal_stage(kind)
    return min(causal_micro_step(micro_step, stage), _MOST_MICRO_STEPS) * _STAGES + stage


def in_causal_order(events: Iterable[Event]) -> tuple[Event, ...]:
    """Return the anomalies of one step in causal order: a cause comes before its effects."""

    def key(event: Event) -> tuple[float, ...]:
        return causal_key(step=None, **{name: getattr(event, name) for name in _CAUSAL_FIELDS})

    return tuple(sorted(events, key=key))


_CAUSAL_FIELDS: Final = ("micro_step", "kind", "vpp_stage", "pp_stage", "call_id", "op")

PATIENCE: Final = 3
"""The number of sampled steps with an update after which a kind without rows is reported."""


_OF_KINDS: Final = ("features", "histograms")
"""Datasets with a column for the kind of each row."""


@dataclass(slots=True)
class _Seen:
    """The rows of one kind so far."""

    steps_with: int = 0
    steps_without: int = 0  # since the last step with rows
    is_lost: bool = False


class SilentKinds:
    """Reports expected kinds that have no rows in the first steps, or that have had rows and have none any more.

    Used on the publisher thread only.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self._seen: dict[str, _Seen] = {}
        self._present: set[str] = set()
        self._plan: Plan | None = None
        self._names = np.zeros(0, str)  # of the kinds in the plan
        self._kinds = np.zeros(0, np.int64)  # by entry of the plan: position of its kind in `_names`

    def see(self, plan: Plan, present: npt.NDArray[np.bool_]) -> None:
        """Store the kinds of statistics that a step has. `present` is true for the entries of `plan` with a row."""
        if plan is not self._plan:
            names = [_name(entry.kind, entry.micro_step) for entry in plan.entries]
            self._names, self._kinds = np.unique(np.array(names, str), return_inverse=True)
            self._plan = plan
        self._present = set(self._names[np.unique(self._kinds[present])].tolist())

    def judge(self, expected: Iterable[ExpectedRows], rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Publish notices about kinds that the step should have. `rows` has the rows of its other datasets."""
        present, self._present = self._present, set()
        for dataset in _OF_KINDS:
            present.update(map(itemgetter("kind"), rows.get(dataset, ())))
        for item in expected:
            never, lost = [], []
            for kind in sorted(item.kinds):
                seen = self._seen.setdefault(kind, _Seen())
                seen.steps_without = 0 if kind in present else seen.steps_without + 1
                seen.steps_with += kind in present
                if seen.steps_without == PATIENCE and not seen.steps_with and not item.names_unmeasured:
                    never.append(kind)
                elif seen.steps_without == PATIENCE <= seen.steps_with and not seen.is_lost:
                    seen.is_lost = True
                    lost.append(kind)
            why = f" ({item.remark})" if item.remark else ""
            if never:
                self.tell(f"{item.quantity}: {', '.join(never)} had no rows in {PATIENCE} measured updates{why}")
            if lost:
                self.tell(f"{item.quantity}: {', '.join(lost)} had rows, and none in {PATIENCE} measured updates{why}")


def _name(kind: str, micro_step: int | None) -> str:
    return OF_MICRO_BATCHES if kind == Kind.GRAD_UNREDUCED and micro_step is not None else str(kind)
