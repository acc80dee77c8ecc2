"""Judges the score rules of a rank: makes a frame of each step, and events and scalars of the verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rankscope_contract.model.event_tags import scalar_tag
from rankscope_contract.model.events import Event, EventType
from rankscope_contract.model.kinds import COUNT_OPS, GRADIENT_KINDS, VALUE_OPS, Kind
from rankscope_contract.model.schema import PlanEntry
from rankscope_contract.rules.evaluator import Frame, Layout, ScoreEvaluator
from rankscope_contract.rules.score import RULE_SCORE, STATE_LOADED, ScoreRule, kinds_named, kinds_of
from rankscope_exporter.records.optimizer_settings import GroupSettings, OptimizerSettings
from rankscope_exporter.records.plan import Finished, PlanVersion
from rankscope_exporter.records.record import Scalar, StepRecord

_OF_UPDATE: Final = (*GRADIENT_KINDS[1:], Kind.EXP_AVG, Kind.EXP_AVG_SQ)
_LARGEST: Final = float(np.finfo(np.float32).max)  # instead of Inf, which would count as a non-finite value


class StepScores:
    """The score rules of one rank. Used on the publisher thread only."""

    def __init__(self, rules: Sequence[object], tell: Callable[[str], None]) -> None:
        """Judge those of `rules` that are score rules; `tell` receives the reasons for which a rule is not judged."""
        of_rank = (rule for rule in rules if isinstance(rule, ScoreRule) and rule.scope == "rank")
        self._evaluator = ScoreEvaluator(of_rank, tell)
        tags = (tag for rule in self._evaluator.rules for tag in rule.scalars)
        self._names = {tag.partition("/")[0] for tag in tags}
        self._version: PlanVersion | None = None
        self._layout = Layout((), {})
        self._entries: list[PlanEntry] = []  # one for each tensor of the layout
        self._owners: list[int] = []  # the position of each in the model
        self._settings: OptimizerSettings | None = None
        self._numbers: dict[str, npt.NDArray[np.float64]] | None = None  # of these settings; None after another plan
        self._groups = np.zeros(0, np.int64)  # of each tensor, -1 without one
        self._facts: dict[str, npt.NDArray[np.bool_]] = {}
        self._step: int | None = None  # of the last step with statistics

    def judge(
        self, record: StepRecord, finished: Finished | None, scalars: Sequence[Scalar], pp_stage: int | None
    ) -> tuple[list[Event], list[Scalar]]:
        """Return the events of the rules that fire at the step of `record`, and the largest score of each rule."""
        if not self._evaluator.rules or (finished is None and not scalars):
            return [], []
        verdict = self._evaluator.observe(self._frame(record, finished, scalars))
        events = [self._event(*firing, pp_stage) for firing in verdict.firings]
        scores = [
            Scalar(RULE_SCORE, min(one.score, _LARGEST), labels=self._labels(one.rule, one.tensor))
            for one in verdict.largest
            if finished is not None or one.tensor is None
        ]
        return events, [*scores, Scalar(STATE_LOADED, 1.0)] if record.is_loaded else scores

    def _frame(self, record: StepRecord, finished: Finished | None, scalars: Sequence[Scalar]) -> Frame:
        numbers = {}
        for scalar in reversed(scalars):
            if scalar.name in self._names:
                numbers[scalar.name] = numbers[scalar_tag(scalar.name, scalar.labels)] = scalar.value
        if finished is None or record.plan is None:
            return Frame(scalars=numbers)
        self._follow(record.plan)
        if record.settings is not self._settings or self._numbers is None:
            self._settings = record.settings
            self._read_settings(record.settings)
        numbers_of, facts = self._numbers or {}, self._facts
        if record.found_inf:  # a fused optimizer gets the scaled gradient
            facts = facts | {"plain_gradient": np.zeros(len(self._entries), np.bool_)}
        if record.updates:  # the settings are those of one update
            is_one = np.array([*(count == 1 for count in record.updates), False])  # the last one for -1
            is_known = record.settings is not None and len(record.settings.groups) == len(record.updates)
            numbers_of = {name: np.where(is_one[self._groups], v, np.nan) for name, v in numbers_of.items() if is_known}
        follows = self._step is not None and record.step == self._step + 1 and not record.is_loaded
        self._step = record.step
        rows = dict(zip(VALUE_OPS, finished.values.astype(np.float64), strict=True))
        counts = np.where(finished.present, finished.counts, np.nan)
        return Frame(
            rows=rows | dict(zip(COUNT_OPS, counts, strict=True)),
            layout=self._layout,
            scalars=numbers,
            settings=numbers_of,
            facts=facts,
            follows=follows,
        )

    def _follow(self, version: PlanVersion) -> None:
        if version is self._version:
            return
        self._version, self._numbers = version, None
        places: dict[tuple[Any, ...], int] = {}
        columns: dict[str, dict[int, int]] = {}
        self._entries, self._owners = [], []
        parts: list[set[tuple[Any, ...]]] = []
        for column, (entry, owner) in enumerate(zip(version.entries, version.owners, strict=True)):
            if owner < 0:
                continue
            key = entry.tensor, entry.index, entry.vpp_stage
            if key not in places:
                places[key] = len(places)
                self._entries.append(entry)
                self._owners.append(owner)
                parts.append(set())
            place = places[key]
            columns.setdefault(str(entry.kind), {})[place] = column  # of the micro-batches, the last one
            if entry.kind in _OF_UPDATE:
                parts[place].add((entry.placement, entry.shape))
        filled = {kind: np.full(len(places), -1, np.int64) for kind in columns}
        for kind, found in columns.items():
            filled[kind][[*found]] = [*found.values()]
        self._layout = Layout(tuple(places), filled)
        self._facts = {"same_part": np.array([len(known) <= 1 for known in parts], np.bool_)}

    def _read_settings(self, settings: OptimizerSettings | None) -> None:
        """Store the settings of each tensor's group, and the facts about them."""
        own: list[GroupSettings | None] = [None] * len(self._owners)
        are_float32 = np.zeros(len(own), np.bool_)
        if settings is not None:
            groups = (*settings.groups, None)  # the last one is that of a parameter without a group, -1
            self._groups = settings.group_of[self._owners]
            own = [groups[number] for number in self._groups.tolist()]
            are_float32 = settings.has_float32_moments[self._owners]

        def numbers(name: str) -> npt.NDArray[np.float64]:
            return np.array([getattr(group, name, None) for group in own], np.float64)  # None becomes NaN

        def flags(name: str) -> npt.NDArray[np.bool_]:
            return np.array([bool(getattr(group, name, False)) for group in own], np.bool_)

        self._numbers = {name: numbers(name) for name in ("beta1", "beta2", "weight_decay")}
        self._facts |= {
            "adam": flags("is_adam"),
            "decoupled_decay": ~flags("decays_gradient"),
            "minimizes": ~flags("maximizes"),
            "float32_moments": are_float32,
        }

    def _labels(self, rule: ScoreRule, tensor: int | None) -> dict[str, str]:
        return {"rule": rule.name} if tensor is None else {"rule": rule.name, "tensor": self._entries[tensor].label}

    def _event(self, rule: ScoreRule, tensor: int | None, score: float, pp_stage: int | None) -> Event:
        entry = None if tensor is None else self._entries[tensor]
        return Event(
            type=EventType.ANOMALY,
            severity=rule.severity,
            rule=rule.name,
            op=rule.subject,
            value=min(score, _LARGEST),
            threshold=rule.above,
            pp_stage=pp_stage,
            kind=self._kind(rule),
            tensor=None if entry is None else entry.tensor,
            vpp_stage=None if entry is None else entry.vpp_stage,
            message=rule.message(None if entry is None else entry.label, score),
        )

    def _kind(self, rule: ScoreRule) -> str | None:
        """Return the kind of tensor that the score of `rule` reads first; None if it reads none."""
        kinds = (kind for one in kinds_of(rule.tree) for kind in kinds_named(one))
        return next((kind for kind in kinds if kind in self._layout.columns), None)
