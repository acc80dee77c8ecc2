"""Apply anomaly rules to imported rows, so that imported runs have the same anomaly events as monitored runs.

The rules run in the reference evaluator. Its results define which anomalies the rules on a rank must report.

The curve rules are evaluated for all rows of a table together: spikes of the loss, steps that become slow, and others.
The rules and the evaluation of single values, which ranks use, are in `rankscope_contract.rules.curve`.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.events import EventType
from rankscope_contract.model.kinds import JUDGED_OPS, VALUE_OPS
from rankscope_contract.rules import AnomalyRule, curve
from rankscope_contract.rules.curve import FEWEST_ROWS, RISE, RISEN_ROWS, Curve, CurveRule, SeriesEvaluator
from rankscope_contract.rules.evaluator import Frame, ScoreEvaluator
from rankscope_contract.rules.score import ScoreRule, kinds_of
from rankscope_ingest.base.tables import table_schema
from rankscope_storage.base.rule_names import SLOW_FACTOR, SLOW_STEPS

Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

IMPORT_RULES: Final = (
    *curve.RANK_RULES,
    CurveRule(name="GradNormSpike", ratio=30.0, deviations=8.0, fewest=50, names=("grad_norm",)),
    CurveRule(
        name=SLOW_STEPS,
        ratio=SLOW_FACTOR,
        rows=10,
        fewest=10,
        in_a_row=3,
        deviations=3.0,
        skips_pauses=True,
        names=("step_seconds",),
        rates=("tokens_per_second", "tokens_per_second_per_gpu", "samples_per_second"),
    ),
)
"""The rules that apply to imported logs if the user configures none."""

_SCALAR_SERIES: Final = ("rank", "attempt", "name", "labels")
_PAUSES: Final = (EventType.EVALUATION.value, EventType.CHECKPOINT.value)


@dataclass(frozen=True, slots=True)
class CurveFiring:
    """Firings of one rule: row numbers of the table, and the median before each of these rows."""

    rule: CurveRule
    rows: Integers
    medians: Numbers


@dataclass(slots=True)
class _Curve(Curve):
    seq: int = -1

    def firings(self, rule: CurveRule, values: Numbers, seqs: Integers, pauses: Integers) -> tuple[Integers, Numbers]:
        """Return the positions in `values` at which `rule` fires, and the medians before them; then add the values."""
        previous = np.append(self.seq, seqs[:-1])
        if rule.above == "highest":  # only a value that is far above all before it needs the comparison one by one
            highest = np.maximum.accumulate(np.append(self.highest, values))[:-1]
            far = np.flatnonzero((values >= rule.ratio * highest) & (highest > 0))
            single = int(far[-1]) + 1 if len(far) else 0
        else:
            single = max(0, rule.rows - len(self.values))
        found = [self.compared(rule, value) for value in values[:single].tolist()]
        medians = np.full(len(values), np.nan)
        medians[: len(found)] = np.array(found, np.float64)  # None becomes NaN
        judged = values[single:]
        if len(judged) and rule.above == "highest":
            self._raise(rule, judged)
        elif len(judged):
            history = np.concatenate([self.values, judged])
            windows = np.lib.stride_tricks.sliding_window_view(history[:-1], rule.rows)
            # The median is not below the lowest value: few rows need a median.
            for row in np.flatnonzero(judged >= rule.ratio * windows.min(axis=1)).tolist():
                median = rule.compare(float(judged[row]), windows[row].tolist())
                medians[single + row] = np.nan if median is None else median
            if rule.holds:
                self._rise(rule, history, windows, medians[single:])
            self.values, self.count = history[-rule.rows :].tolist(), self.count + len(judged)
        is_above = np.isfinite(medians)
        if rule.skips_pauses:
            is_above &= np.searchsorted(pauses, previous, "right") == np.searchsorted(pauses, seqs, "right")
        runs = _run_lengths(is_above, self.above)
        self.above, self.seq = int(runs[-1]), int(seqs[-1])
        fired = np.flatnonzero(runs == rule.in_a_row)
        return self._hold(rule, values, fired, medians) if rule.holds else (fired, medians[fired])

    def _raise(self, rule: CurveRule, values: Numbers) -> None:
        """Add values of which none is far above all before it, for a rule about the highest value."""
        highest = np.maximum.accumulate(np.append(self.highest, values))
        rises = np.diff(highest)[highest[:-1] >= 0]
        self.rise = max(self.rise, float(rises.max(initial=0.0)))
        self.highest, self.count = float(highest[-1]), self.count + len(values)
        self.values = [*self.values, *values[-rule.rows :].tolist()][-rule.rows :]

    def _rise(self, rule: CurveRule, history: Numbers, windows: Numbers, medians: Numbers) -> None:
        """Write the lowest median into `medians` for the rows that end a rise above its limit. See `Curve`."""
        newest = np.lib.stride_tricks.sliding_window_view(history, min(FEWEST_ROWS, rule.rows))[-len(medians) :]
        lowest = np.minimum.accumulate(np.append(self.lowest, np.median(newest, axis=1)))
        judged, self.lowest = history[-len(medians) :], float(lowest[-1])
        risen = _run_lengths(judged >= RISE * rule.ratio * lowest[:-1], self.risen)
        self.risen = int(risen[-1])
        for row in np.flatnonzero((risen >= RISEN_ROWS) & np.isnan(medians)).tolist():
            if rule.rises(float(judged[row]), float(lowest[row]), windows[row].tolist()):
                medians[row] = lowest[row]

    def _hold(self, rule: CurveRule, values: Numbers, fired: Integers, medians: Numbers) -> tuple[Integers, Numbers]:
        """Return all positions up to the return of the values after each firing, and the medians before them."""
        held, end = np.full(len(values), np.nan), 0
        for row, median in [(0, self.held), *((row, float(medians[row])) for row in fired.tolist())]:
            if row >= end and values[row] >= rule.ratio * median:
                below = np.flatnonzero(values[row:] < rule.ratio * median)
                end = row + int(below[0]) if len(below) else len(values)
                held[row:end] = median
        self.held = float(held[-1])
        rows = np.flatnonzero(np.isfinite(held))
        return rows, held[rows]


class _Names:
    """The names of the scalars in a table; `known` has the name of each row."""

    def __init__(self, scalars: pa.Table) -> None:
        names = scalars.column("name").combine_chunks().dictionary_encode()
        self.known: list[str] = names.dictionary.to_pylist()
        self._codes: npt.NDArray[np.int32] = names.indices.to_numpy()

    def rows(self, names: AbstractSet[str]) -> Flags:
        """Return, for each row, whether its name is one of `names`."""
        return np.array([name in names for name in self.known], np.bool_)[self._codes]


class CurveEvaluator:
    """Applies the curve rules to the scalars of one import. Tables must be evaluated in the order of the log."""

    def __init__(self, rules: tuple[CurveRule, ...]) -> None:
        self._rules = rules
        self._curves: dict[tuple[Any, ...], _Curve] = {}
        self._last_pauses: dict[str, Integers] = {}

    def evaluate(self, tables: Mapping[str, pa.Table]) -> list[CurveFiring]:
        """Return the firings for the rows of the table `scalars`."""
        scalars, names = tables["scalars"], _Names(tables["scalars"])
        logged, seqs = scalars.column("value").to_numpy(), scalars.column("seq").to_numpy()
        pauses, is_finite = self._pauses(tables, names), np.isfinite(logged)  # null is NaN
        found = []
        for rule in self._rules:
            rows = np.flatnonzero(names.rows({*rule.names, *rule.rates}) & is_finite)
            if not len(rows):  # most logs lack the scalars of some rules
                continue
            fired, medians = [np.empty(0, np.int64)], [np.empty(0)]
            for key, positions in _series(scalars.select([*_SCALAR_SERIES]).take(rows)):
                own = rows[positions]
                is_rate = key[_SCALAR_SERIES.index("name")] in rule.rates
                values = logged[own]
                if is_rate:
                    own, values = own[values > 0], 1 / values[values > 0]
                if not len(own):
                    continue
                series = self._curves.setdefault((rule.name, *key), _Curve())
                at, middle = series.firings(rule, values, seqs[own], pauses)
                fired.append(own[at])
                medians.append(1 / middle if is_rate else middle)
            found.append(CurveFiring(rule, np.concatenate(fired), np.concatenate(medians)))
        return [firing for firing in found if len(firing.rows)]

    def _pauses(self, tables: Mapping[str, pa.Table], names: _Names) -> Integers:
        """Return the sorted record numbers of evaluations and checkpoints in `tables` and in the previous tables."""
        scalars = tables["scalars"]
        incarnation = str(scalars.column("incarnation")[0])
        evaluations = names.rows({name for name in names.known if name.startswith("eval_")})
        found = [scalars.column("seq").to_numpy()[evaluations]]
        if "events" in tables:
            events = tables["events"]
            is_pause = pc.is_in(events.column("type").cast(pa.string()), pa.array(_PAUSES))
            found.append(events.column("seq").filter(is_pause).to_numpy())
        before = self._last_pauses.get(incarnation, np.empty(0, np.int64))
        pauses = np.unique(np.concatenate([before, *found]))
        self._last_pauses[incarnation] = pauses[-1:]
        return pauses


def _run_lengths(flags: Flags, before: int) -> Integers:
    """Return, for each flag, the number of consecutive true flags that end with it; `before` of them come first."""
    places = np.arange(1, len(flags) + 1)
    last_false = np.maximum.accumulate(np.where(flags, 0, places))
    return np.where(flags, places - last_false + np.where(last_false == 0, before, 0), 0)


def _series(keys: pa.Table) -> list[tuple[tuple[Any, ...], Integers]]:
    """Return each different row of `keys` with the positions of this row, ascending."""
    if not keys.num_rows:
        return []
    numbered = np.zeros(keys.num_rows, np.int64)
    for column in keys.columns:
        text = column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
        codes = text.combine_chunks().dictionary_encode(null_encoding="encode")
        if len(codes.dictionary) > 1:
            _, numbered = np.unique(numbered * len(codes.dictionary) + codes.indices.to_numpy(), return_inverse=True)
    _, firsts, inverse = np.unique(numbered, return_index=True, return_inverse=True)
    return [
        (tuple(keys.slice(int(first), 1).to_pylist()[0].values()), np.flatnonzero(inverse == place))
        for place, first in enumerate(firsts)
    ]


class ScoreRules:
    """Applies those score rules that read logged numbers alone to the scalars of one import."""

    def __init__(self, rules: Iterable[ScoreRule]) -> None:
        self._rules = tuple(rule for rule in rules if not kinds_of(rule.tree))
        self._evaluators: dict[tuple[Any, ...], ScoreEvaluator] = {}
        self.names = {name for rule in self._rules for name in rule.scalars if "/" not in name}  # without labels

    def evaluate(self, table: pa.Table) -> Iterator[Fired]:
        """Yield a firing for each record of `table` at which a rule fires, with the score instead of a baseline."""
        rows = np.flatnonzero(_Names(table).rows(self.names) & table.column("value").is_valid().to_numpy())
        taken = table.select(["rank", "attempt", "seq", "name", "value"]).take(rows).to_pydict().values()
        records = zip(rows.tolist(), zip(*taken, strict=True), strict=True)
        for (rank, attempt, _), record in itertools.groupby(records, key=lambda row: row[1][:3]):
            found = list(record)
            evaluator = self._evaluators.setdefault((rank, attempt), ScoreEvaluator(self._rules))
            scalars = {name: value for _, (*_, name, value) in reversed(found)}
            for firing in evaluator.observe(Frame(scalars=scalars)).firings:
                named = (row for row, (*_, name, _) in found if name in firing.rule.scalars)
                yield next(named, found[0][0]), firing.rule, firing.score


_SERIES: Final = ("rank", "attempt", "vpp_stage", "micro_step", "kind", "tensor", "index", "call_seq")
_PLACE: Final = ("run", "attempt", "rank", "incarnation", "seq", "ordinal", "step", "micro_step", "ts", "ts_origin")
_COUNTS: Final = ("nans", "infs")

Fired = tuple[int, AnomalyRule, float]
"""The number of a row, a rule that fires for it, and the baseline before the row; NaN without one."""


class RuleEvaluator:
    """Applies anomaly rules to the rows of one import, and holds the baseline of each series of values.

    Tables must be evaluated in the order of the log.
    """

    def __init__(self, rules: Sequence[AnomalyRule]) -> None:
        self._rules = tuple(rule for rule in rules if not isinstance(rule, CurveRule | ScoreRule))
        self._scores = ScoreRules(rule for rule in rules if isinstance(rule, ScoreRule))
        self._curve_rules = tuple(rule for rule in rules if isinstance(rule, CurveRule))
        self._curves = CurveEvaluator(self._curve_rules)
        self._series: dict[tuple[Any, ...], tuple[SeriesEvaluator, ...]] = {}
        self._scalar_series: dict[tuple[Any, ...], SeriesEvaluator] = {}

    def learns_from(self, tables: Mapping[str, pa.Table]) -> bool:
        """Return whether later firings depend on the rows of `tables`, also if these rows are already stored."""
        return "tensor_stats" in tables or ("scalars" in tables and bool(self._curve_rules or self._scores.names))

    def evaluate(self, tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
        """Return `tables` with baselines in `tensor_stats`, and with one additional anomaly event per firing.

        If the log contains baselines, these are not changed.
        """
        evaluated = dict(tables)
        events = []
        if "scalars" in tables:
            events += self._scalars(tables["scalars"])
            events += _events(tables["scalars"], self._scores.evaluate(tables["scalars"]))
            for firing in self._curves.evaluate(tables):
                fired = zip(firing.rows.tolist(), firing.medians.tolist(), strict=True)
                events += _events(tables["scalars"], [(row, firing.rule, median) for row, median in fired])
        if "tensor_stats" in tables:
            evaluated["tensor_stats"], found = self._tensors(tables["tensor_stats"])
            events += found
        if events:
            events = [evaluated["events"], *events] if "events" in evaluated else events
            evaluated["events"] = pa.concat_tables([table.cast(table_schema("events")) for table in events])
        return evaluated

    def _scalars(self, table: pa.Table) -> list[pa.Table]:
        names = _Names(table)
        same_rules: dict[tuple[AnomalyRule, ...], set[str]] = defaultdict(set)
        for name in names.known:
            same_rules[tuple(rule for each in self._rules if (rule := each.for_scalar(name)) is not None)].add(name)
        is_valid = table.column("value").is_valid().to_numpy()
        firings: list[Fired] = []
        for rules, alike in same_rules.items():
            if rules:
                firings += self._scalar_firings(table, np.flatnonzero(names.rows(alike) & is_valid), rules)
        return _events(table, firings)

    def _scalar_firings(self, table: pa.Table, rows: Integers, rules: Sequence[AnomalyRule]) -> Iterator[Fired]:
        """Yield a firing for each of `rows` of scalars for which one of `rules` fires."""
        values = table.column("value").to_numpy()[rows]
        if any(rule.needed_values() is not None for rule in rules):
            keys = zip(*table.select([*_SCALAR_SERIES]).take(rows).to_pydict().values(), strict=True)
            for row, key, value in zip(rows.tolist(), keys, values.tolist(), strict=True):
                series = self._scalar_series.get(key)
                if series is None:
                    name = key[_SCALAR_SERIES.index("name")]
                    series = self._scalar_series[key] = SeriesEvaluator(self._rules, None, "value", name)
                if (firing := series.observe(value)) is not None:
                    yield row, firing.rule, firing.baseline
            return
        free = np.ones(len(values), np.bool_)
        for rule in rules:
            fires = np.asarray(rule.fires("value", values, math.nan), np.bool_) & free
            free &= ~fires  # the first rule that fires gives the alert its name
            yield from ((row, rule, math.nan) for row in rows[fires].tolist())

    def _tensors(self, table: pa.Table) -> tuple[pa.Table, list[pa.Table]]:
        found = self._stateless(table)
        given = [table.column(f"{op}_baseline") for op in JUDGED_OPS]
        if any(column.null_count < len(column) for column in given):
            return table, found
        keys = list(zip(*(table.column(name).to_pylist() for name in _SERIES), strict=True))
        for place, op in enumerate(JUDGED_OPS):
            values = table.column(op).to_pylist()
            baselines: list[float | None] = []
            firings: list[Fired] = []
            for row, (key, value) in enumerate(zip(keys, values, strict=True)):
                evaluator = self._evaluators(key)[place]
                firing = None if value is None else evaluator.observe(value)
                baselines.append(_known(evaluator.baseline if value is None else evaluator.compared))
                if firing is not None:
                    firings.append((row, firing.rule, firing.baseline))
            position = table.column_names.index(f"{op}_baseline")
            table = table.set_column(position, table.schema.field(position), pa.array(baselines, pa.float32()))
            found += _events(table, firings, op)
        return table, found

    def _evaluators(self, key: tuple[Any, ...]) -> tuple[SeriesEvaluator, ...]:
        known = self._series.get(key)
        if known is None:
            kind = key[_SERIES.index("kind")]
            known = self._series[key] = tuple(SeriesEvaluator(self._rules, kind, op) for op in JUDGED_OPS)
        return known

    def _stateless(self, table: pa.Table) -> list[pa.Table]:
        """Return the anomaly events of rules that need no baseline.

        NaN and Inf in the same tensor cause a single event.
        """
        kinds = table.column("kind").cast(pa.string())
        found = []
        free = np.ones(len(table), np.bool_)
        for op in (*_COUNTS, *(op for op in VALUE_OPS if op not in JUDGED_OPS)):
            column = table.column(op).cast(pa.float64())
            values = column.to_numpy()
            open_rows = free & column.is_valid().to_numpy()
            for rule in self._rules:
                fires = np.asarray(rule.fires(op, values, math.nan), np.bool_) & open_rows & _covered(rule, kinds, op)
                open_rows &= ~fires
                if op in _COUNTS:
                    free &= ~fires
                found += _events(table, [(int(row), rule, math.nan) for row in np.flatnonzero(fires)], op)
            if op == _COUNTS[-1]:
                free = np.ones(len(table), np.bool_)
        return found


def _covered(rule: AnomalyRule, kinds: pa.ChunkedArray, op: str) -> npt.NDArray[np.bool_]:
    covered_kinds = [kind for kind in kinds.unique().to_pylist() if rule.judges(kind, op)]
    return np.asarray(pc.is_in(kinds, pa.array(covered_kinds, pa.string())).to_numpy())


def _events(table: pa.Table, firings: Iterable[Fired], op: str | None = None) -> list[pa.Table]:
    """Return the anomaly events of firings in `table`, one table per rule; `op` is the column of values of tensors.

    Run, attempt, rank, step and time are those of the row. Event columns without a value are null.
    """
    by_rule: dict[AnomalyRule, list[tuple[int, float]]] = defaultdict(list)
    for row, rule, baseline in firings:
        by_rule[rule].append((row, baseline))
    found, schema = [], table_schema("events")
    for rule, fired in by_rule.items():
        count, rows = len(fired), table.take(pa.array([row for row, _ in fired], pa.int64()))
        value = rows.column(op or "value").cast(pa.float64())
        given = {name: rows.column(name) for name in _PLACE} | {"value": value}
        given["baseline"] = pa.array([_known(baseline) for _, baseline in fired], pa.float64())
        same = {"type": EventType.ANOMALY.value, "severity": str(rule.severity), "rule": rule.name, "op": op}
        given |= {name: pa.array([text] * count, pa.string()) for name, text in same.items()}
        given["threshold"] = pa.array([rule.limit()] * count, pa.float64())
        if op is None:
            given["op"] = rows.column("name").cast(pa.string())
            subject: tuple[Any, ...] = (f"{rule.name}: ", given["op"])
        else:
            given |= {name: rows.column(name).cast(pa.string()) for name in ("kind", "tensor")}
            given["vpp_stage"] = rows.column("vpp_stage")
            subject = (f"{rule.name} on ", given["kind"], " of ", given["tensor"], f": {op}")
        given["message"] = pc.binary_join_element_wise(*subject, " is ", value.cast(pa.string()), "")
        if isinstance(rule, ScoreRule):
            scores = [score for _, score in fired]
            given |= {"value": pa.array(scores, pa.float64()), "baseline": pa.nulls(count, pa.float64())}
            given["message"] = pa.array([rule.message(None, score) for score in scores])
        if isinstance(rule, CurveRule):
            compared = zip(*(given[name].to_pylist() for name in ("op", "value", "baseline")), strict=True)
            given["message"] = pa.array([rule.message(*each) for each in compared])
        arrays = [
            given[field.name].cast(field.type) if field.name in given else pa.nulls(count, field.type)
            for field in schema
        ]
        found.append(pa.table(arrays, schema=schema))
    return found


def _known(baseline: float) -> float | None:
    return None if math.isnan(baseline) else baseline
