"""Judge score rules on the stored statistics and logged numbers of a run, step by step, as its ranks do.

The rows are read in blocks of records, so that the memory does not grow with the run. The state of the rules begins
with each process, as on a rank.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from rankscope_contract.model.event_tags import scalar_tag
from rankscope_contract.model.kinds import Kind
from rankscope_contract.rules import score
from rankscope_contract.rules.evaluator import MOST_FIRINGS, Frame, Layout, ScoreEvaluator, ScoreFiring, Values
from rankscope_contract.rules.expression import GRADIENT
from rankscope_contract.rules.score import RULE_SCORE, STATE_LOADED, ScoreRule
from rankscope_storage.base.datasets import IMPORT_PREFIX
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.connection import Connection

FACTORS: Final = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""Multiples of the limit of a rule for which its firings are counted."""

EQUAL: Final = 1e-9
"""Largest relative difference of a replayed and a stored score that are equal."""

BLOCK_ROWS: Final = 1_000_000
"""Number of rows in one read."""

_PRESETS: Final = {rule.name: rule.score for rule in score.SCORE_RULES}
_OF_SETTINGS: Final = {scalar: setting for setting, scalar in score.SCALAR_OF_SETTING.items()}
_LARGEST: Final = float(np.finfo(np.float32).max)  # of a stored score
_OF_PARAMETERS: Final = tuple(kind for kind in Kind if not kind.startswith(("act_", "comm_")))
"""The kinds of tensors that belong to a parameter. Ranks judge no others."""

_SERIES: Final = """\
SELECT DISTINCT kind, tensor, "index", vpp_stage FROM tensor_stats
WHERE run = $run AND kind IN (SELECT unnest($kinds)) ORDER BY ALL"""
_RECORD: Final = "attempt NULLS FIRST, rank NULLS FIRST, incarnation, seq"
_STATISTICS: Final = f"""\
WITH series AS (SELECT unnest($kind::VARCHAR[]) AS kind, unnest($tensor::VARCHAR[]) AS tensor,
  unnest($index::INTEGER[]) AS of_index, unnest($vpp_stage::INTEGER[]) AS of_stage,
  unnest(range(len($kind::VARCHAR[]))) AS series)
SELECT attempt, rank, incarnation, seq, step, series, dense_rank() OVER (ORDER BY {_RECORD}) AS record, {{ops}}
FROM tensor_stats JOIN series ON tensor_stats.kind = series.kind AND tensor_stats.tensor = series.tensor
  AND "index" IS NOT DISTINCT FROM of_index AND vpp_stage IS NOT DISTINCT FROM of_stage
WHERE run = $run AND seq BETWEEN $first AND $last
ORDER BY record, micro_step NULLS FIRST, call_seq NULLS FIRST"""
_SCALARS: Final = f"""\
SELECT DISTINCT attempt, rank, incarnation, seq, step, if(used, name, NULL) AS name, if(used, labels, NULL) AS labels,
  if(used, coalesce(value, 'nan'::DOUBLE), NULL) AS value
FROM (SELECT *, name IN (SELECT unnest($names)) AS used FROM scalars
  WHERE run = $run AND seq BETWEEN $first AND $last)
ORDER BY {_RECORD}, name DESC, labels DESC NULLS LAST"""
_EXTENT: Final = """\
SELECT min(seq) AS first, max(seq) AS last, count(seq) AS rows FROM (
  SELECT seq FROM tensor_stats WHERE run = $run UNION ALL SELECT seq FROM scalars WHERE run = $run)"""
SCORED: Final = f"""\
SELECT DISTINCT json_extract_string(labels, '$.rule') AS rule FROM scalars WHERE run = $run AND name = '{RULE_SCORE}'"""
"""The names of the rules of which ranks have stored scores."""

NOT_JUDGED: Final = """\
SELECT DISTINCT attempt, rank, message FROM events
WHERE run = $run AND type = 'note' AND message LIKE '% is not judged %' ORDER BY ALL"""
"""The notes of ranks that a rule is not judged for some tensors."""

Key = tuple[int | None, int | None, str | None]
"""Attempt, rank and process."""


@dataclass(slots=True)
class Outcome:
    """The counts of a replay."""

    firings: int = 0
    counts: Counter[tuple[str, float]] = field(default_factory=Counter)
    """By rule and limit: the number of firings."""
    largest: dict[str, float] = field(default_factory=dict)
    judged: Counter[str] = field(default_factory=Counter)
    """By rule: the number of steps at which a rank had a score."""
    not_judged: dict[str, None] = field(default_factory=dict)
    compared: int = 0
    different: int = 0
    """The number of scores that ranks have stored, and of those that differ from the replayed ones."""


class Replay:
    """Judges `rules` on the run `run`. Each rule is also judged with other limits, see FACTORS."""

    def __init__(
        self, connection: Connection, run: str, rules: Sequence[ScoreRule], *, block_rows: int = BLOCK_ROWS
    ) -> None:
        self.outcome = Outcome()
        self._connection, self._run, self._rules, self._block_rows = connection, run, rules, block_rows
        self._ops = sorted({"norm", "numel", *(op for rule in rules for _, op in _statistics_of(rule) if op != "rms")})
        rows = connection.query(_SERIES, {"run": run, "kinds": _kinds_of(rules)}).to_pylist()
        self._series = {name: [row[name] for row in rows] for name in ("kind", "tensor", "index", "vpp_stage")}
        self._layout = _layout(rows)
        self._notes = connection.query(NOT_JUDGED, {"run": run}).to_pylist()
        self._scored = connection.query(SCORED, {"run": run})["rule"].to_pylist()
        self._processes: dict[Key, _Process] = {}

    def firings(self, progress: Callable[[int, int], None]) -> Iterator[dict[str, Any]]:
        """Yield the firings of the rules. `progress` gets the number of judged records and of all records."""
        first, last, rows = self._connection.query(_EXTENT, {"run": self._run}).to_pylist()[0].values()
        size = max(1, self._block_rows * (last - first + 1) // rows) if rows else 1
        for start in range(first, last + 1, size) if rows else ():
            progress(start - first, last - first + 1)
            for key, step, scalars, statistics in self._records(start, start + size - 1):
                for rule, tensor, value in self._process(key).judge(step, scalars, statistics, self._layout):
                    self.outcome.firings += 1
                    name, index = (None, None) if tensor is None else self._layout.tensors[tensor][:2]
                    place = {"attempt": key[0], "rank": key[1], "step": step, "rule": rule.name}
                    label = name if index is None else f"{name}[{index}]"
                    yield place | {"tensor": label, "score": value, "limit": rule.above}
        for rule in self._rules:
            if not self.outcome.judged[rule.name]:
                why = f"it reads {', '.join(inputs_of(rule))}: a value is missing, or the run is too short"
                self.outcome.not_judged.setdefault(f"{rule.name} is not judged: {why}")

    def _process(self, key: Key) -> _Process:
        if key not in self._processes:
            own = [note["message"] for note in self._notes if (note["attempt"], note["rank"]) == key[:2]]
            self.outcome.not_judged |= dict.fromkeys(f"rank {key[1]}: {text}" for text in own)
            rules = [rule for rule in self._rules if not any(text.startswith(f"{rule.name} is not ") for text in own)]
            is_import = (key[2] or "").startswith(IMPORT_PREFIX)
            self._processes[key] = _Process(rules, () if is_import else self._scored, self.outcome)
        return self._processes[key]

    def _records(self, first: int, last: int) -> Iterator[tuple[Key, int, list[dict[str, Any]], Any]]:
        """Yield process, step, rows of scalars and statistics of each record. Those of a process are in order."""
        chosen = {"run": self._run, "first": first, "last": last}
        found: dict[tuple[Key, int], list[Any]] = {}
        names = {tag.partition("/")[0] for rule in self._rules for tag in rule.scalars}
        names |= {*_OF_SETTINGS, RULE_SCORE, STATE_LOADED}
        for row in self._connection.query(_SCALARS, chosen | {"names": [*names]}).to_pylist():
            found.setdefault(_place(row), [row["step"], [], None])[1].append(row)
        query = _STATISTICS.format(ops=", ".join(f'"{op}"' for op in self._ops))
        rows = self._connection.query(query, chosen | self._series)
        starts = np.flatnonzero(np.diff(rows["record"].to_numpy(), prepend=0))
        for start, end in itertools.pairwise([*starts.tolist(), rows.num_rows]):
            head, own = rows.slice(start, 1).to_pylist()[0], rows.slice(start, end - start)
            statistics = {op: np.full(len(self._series["kind"]), math.nan) for op in self._ops}
            for op, values in statistics.items():
                values[own["series"].to_numpy()] = own[op].cast(pa.float64()).to_numpy()  # null is NaN
            found.setdefault(_place(head), [head["step"], [], None])[2] = statistics
        for (key, _), record in sorted(found.items(), key=lambda item: item[0][1]):
            yield key, *record


class _Process:
    """The rules of one process of a rank. `scored` has the rules with stored scores."""

    def __init__(self, rules: Sequence[ScoreRule], scored: Sequence[str], outcome: Outcome) -> None:
        others = itertools.product((factor for factor in FACTORS if factor != 1), rules)
        variants = [dataclasses.replace(rule, above=rule.above * factor) for factor, rule in others]
        # The words of equal scores have one state: another limit costs one comparison.
        self._evaluator = ScoreEvaluator([*rules, *variants], most_firings=None)
        self._own, self._outcome = set(map(id, rules)), outcome
        self._conditional = [rule for rule in rules if rule.holds_for and rule.name in scored]
        known = dict.fromkeys(scored) | (_PRESETS if scored else {})  # None: the score of the rule of the rank
        self._compared = [rule.name for rule in rules if known.get(rule.name, "") in (rule.score, None)]
        self._settings: dict[str, dict[str, float]] = {name: {} for name in _OF_SETTINGS.values()}  # by group
        self._step: int | None = None  # of the last record with statistics

    def judge(
        self, step: int, rows: Sequence[dict[str, Any]], statistics: dict[str, Values] | None, layout: Layout
    ) -> list[ScoreFiring]:
        """Return the firings of the rules at a record, as on the rank."""
        scalars: dict[str, float] = {}
        stored: dict[str, float] = {}
        for row in rows:
            name, labels = row["name"], json.loads(row["labels"] or "{}")
            if name == RULE_SCORE:
                stored[labels["rule"]] = row["value"]
            else:
                scalars[name] = scalars[scalar_tag(name or "", labels)] = row["value"]
            if name in _OF_SETTINGS:
                self._settings[_OF_SETTINGS[name]][labels.get("group", "")] = row["value"]
        is_loaded = scalars.pop(STATE_LOADED, None) is not None
        frame = Frame(scalars=scalars)
        if statistics is not None:
            count = len(layout.tensors)
            frame = Frame(
                rows=statistics,
                layout=layout,
                scalars=scalars,
                settings={name: np.full(count, _only(groups)) for name, groups in self._settings.items()},
                facts=dict.fromkeys(self._missed(stored), np.zeros(count, np.bool_)),
                follows=self._step is not None and step == self._step + 1 and not is_loaded,
            )
            self._step = step
        elif not scalars:
            return []
        verdict = self._evaluator.observe(frame)
        self._count(verdict.largest, stored)
        self._outcome.counts.update((rule.name, rule.above) for rule, _, _ in verdict.firings)
        return [one for one in verdict.firings if id(one.rule) in self._own][:MOST_FIRINGS]

    def _missed(self, stored: Mapping[str, float]) -> set[str]:
        """Return conditions that no tensor met at a record: the rank has a score of other rules only."""
        missed = {name for rule in self._conditional if stored and rule.name not in stored for name in rule.holds_for}
        return missed.difference(*(rule.holds_for for rule in self._conditional if rule.name in stored))

    def _count(self, largest: Sequence[ScoreFiring], stored: Mapping[str, float]) -> None:
        outcome, scores = self._outcome, {one.rule.name: min(one.score, _LARGEST) for one in largest}
        outcome.judged.update([*scores])
        outcome.largest |= {name: max(value, outcome.largest.get(name, value)) for name, value in scores.items()}
        for name in self._compared:
            before, now = stored.get(name, math.inf), scores.get(name, math.inf)  # no score is infinite
            outcome.compared += name in stored
            outcome.different += not math.isclose(before, now, rel_tol=EQUAL)


def _only(groups: Mapping[str, float]) -> float:
    """Return the value of all parameter groups; NaN if they differ, because the groups of tensors are not stored."""
    values = set(groups.values())
    return values.pop() if len(values) == 1 else math.nan


def _statistics_of(rule: ScoreRule) -> Iterator[tuple[str, str]]:
    for node in rule.tree.walk():
        kind, _, op = node.name.partition(".")
        if op:
            yield kind, op


def _kinds_of(rules: Sequence[ScoreRule]) -> list[str]:
    named = {kind for rule in rules for kind, _ in _statistics_of(rule)}
    kinds = {str(one) for kind in named for one in score.kinds_named(kind)}
    return sorted((kinds | ({Kind.PARAM_AFTER} if GRADIENT in named else set())) & {*_OF_PARAMETERS})


def _layout(rows: Sequence[dict[str, Any]]) -> Layout:
    keys = [(row["tensor"], row["index"], row["vpp_stage"]) for row in rows]
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    columns = {row["kind"]: np.full(len(places), -1, np.int64) for row in rows}
    for number, (row, key) in enumerate(zip(rows, keys, strict=True)):
        columns[row["kind"]][places[key]] = number
    return Layout(tuple(places), columns)


def _place(row: Mapping[str, Any]) -> tuple[Key, int]:
    return (row["attempt"], row["rank"], row["incarnation"]), row["seq"]


def score_rows(rule: str) -> str:
    """Return an SQL condition for the rows of `scalars` with the scores of `rule`."""
    return f"name = '{RULE_SCORE}' and json_extract_string(labels, '$.rule') = {sql_string(rule)}"


def inputs_of(rule: ScoreRule) -> list[str]:
    """Return the quantities, logged numbers and settings that the score of `rule` reads."""
    settings = {node.name for node in rule.tree.walk()} & score.SCALAR_OF_SETTING.keys()
    return [*dict.fromkeys((*(kind for kind, _ in _statistics_of(rule)), *rule.scalars, *sorted(settings)))]
