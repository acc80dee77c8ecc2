"""Apply anomaly rules to imported rows, so that imported runs have the same anomaly events as monitored runs.

The rules run in the reference evaluator. Its results define which anomalies the rules on a rank must report.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.events import EventType
from rankscope_contract.model.kinds import JUDGED_OPS, VALUE_OPS
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.curve import CurveRule, SeriesEvaluator
from rankscope_ingest.base.tables import table_schema
from rankscope_ingest.importers.common.curve_rules import CurveEvaluator

_SERIES: Final = ("rank", "attempt", "vpp_stage", "micro_step", "kind", "tensor", "index", "call_seq")
_SCALAR_SERIES: Final = ("rank", "attempt", "name", "labels")
_PLACE: Final = ("run", "attempt", "rank", "incarnation", "seq", "ordinal", "step", "micro_step", "ts", "ts_origin")
_COUNTS: Final = ("nans", "infs")


class RuleEvaluator:
    """Applies anomaly rules to the rows of one import, and holds the baseline of each series of values.

    Tables must be evaluated in the order of the log.
    """

    def __init__(self, rules: Sequence[AnomalyRule]) -> None:
        self._rules = tuple(rule for rule in rules if not isinstance(rule, CurveRule))
        self._curve_rules = tuple(rule for rule in rules if isinstance(rule, CurveRule))
        self._curves = CurveEvaluator(self._curve_rules)
        self._series: dict[tuple[Any, ...], tuple[SeriesEvaluator, ...]] = {}
        self._scalar_series: dict[tuple[Any, ...], SeriesEvaluator] = {}

    def learns_from(self, tables: Mapping[str, pa.Table]) -> bool:
        """Return whether later firings depend on the rows of `tables`, also if these rows are already stored."""
        return "tensor_stats" in tables or ("scalars" in tables and bool(self._curve_rules))

    def evaluate(self, tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
        """Return `tables` with baselines in `tensor_stats`, and with one additional anomaly event per firing.

        If the log contains baselines, these are not changed.
        """
        evaluated = dict(tables)
        events = []
        if "scalars" in tables:
            events += self._scalars(tables["scalars"])
            events += self._curve_events(tables)
        if "tensor_stats" in tables:
            evaluated["tensor_stats"], found = self._tensors(tables["tensor_stats"])
            events += found
        if events:
            events = [evaluated["events"], *events] if "events" in evaluated else events
            evaluated["events"] = pa.concat_tables([table.cast(table_schema("events")) for table in events])
        return evaluated

    def _curve_events(self, tables: Mapping[str, pa.Table]) -> list[pa.Table]:
        found = []
        for firing in self._curves.evaluate(tables):
            rows = tables["scalars"].take(pa.array(firing.rows))
            names, values = (rows.column(name).to_pylist() for name in ("name", "value"))
            message = [
                firing.rule.message(name, value, median)
                for name, value, median in zip(names, values, firing.medians.tolist(), strict=True)
            ]
            columns = {"op": pa.array(names), "value": pa.array(values), "baseline": pa.array(firing.medians)}
            found.append(_events(rows, firing.rule, columns | {"message": pa.array(message)}))
        return found

    def _scalars(self, table: pa.Table) -> list[pa.Table]:
        names = table.column("name").cast(pa.string())
        same_rules: dict[tuple[AnomalyRule, ...], list[str]] = defaultdict(list)
        for name in names.unique().to_pylist():
            same_rules[tuple(rule for each in self._rules if (rule := each.for_scalar(name)) is not None)].append(name)
        firings: dict[AnomalyRule, list[tuple[int, float]]] = defaultdict(list)
        for rules, alike in same_rules.items():
            chosen = pc.and_(pc.is_in(names, pa.array(alike, pa.string())), pc.is_valid(table.column("value")))
            rows = np.flatnonzero(chosen.to_numpy())
            for row, rule, baseline in self._scalar_firings(table.take(pa.array(rows)), rules):
                firings[rule].append((int(rows[row]), baseline))
        found = []
        for rule, fired in firings.items():
            rows_fired = table.take(pa.array([row for row, _ in fired], pa.int64()))
            op, value = rows_fired.column("name").cast(pa.string()), rows_fired.column("value")
            message = pc.binary_join_element_wise(f"{rule.name}: ", op, " is ", value.cast(pa.string()), "")
            baseline = pa.array([_known(baseline) for _, baseline in fired], pa.float64())
            found.append(
                _events(rows_fired, rule, {"op": op, "value": value, "baseline": baseline, "message": message})
            )
        return found

    def _scalar_firings(self, rows: pa.Table, rules: Sequence[AnomalyRule]) -> Iterator[tuple[int, AnomalyRule, float]]:
        """Yield (row, rule, baseline) for each scalar in `rows` for which one of `rules` fires."""
        values = rows.column("value").to_numpy()
        if any(rule.needed_values() is not None for rule in rules):
            keys = zip(*(rows.column(name).to_pylist() for name in _SCALAR_SERIES), strict=True)
            for row, (key, value) in enumerate(zip(keys, values.tolist(), strict=True)):
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
            yield from ((int(row), rule, math.nan) for row in np.flatnonzero(fires))

    def _tensors(self, table: pa.Table) -> tuple[pa.Table, list[pa.Table]]:
        found = self._stateless(table)
        given = [table.column(f"{op}_baseline") for op in JUDGED_OPS]
        if any(column.null_count < len(column) for column in given):
            return table, found
        keys = list(zip(*(table.column(name).to_pylist() for name in _SERIES), strict=True))
        for place, op in enumerate(JUDGED_OPS):
            values = table.column(op).to_pylist()
            baselines: list[float | None] = []
            firings: list[tuple[int, AnomalyRule, float]] = []
            for row, (key, value) in enumerate(zip(keys, values, strict=True)):
                evaluator = self._evaluators(key)[place]
                firing = None if value is None else evaluator.observe(value)
                baselines.append(_known(evaluator.baseline if value is None else evaluator.compared))
                if firing is not None:
                    firings.append((row, firing.rule, firing.baseline))
            position = table.column_names.index(f"{op}_baseline")
            table = table.set_column(position, table.schema.field(position), pa.array(baselines, pa.float32()))
            found += _firing_events(table, op, firings)
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
                found += _firing_events(table, op, [(int(row), rule, math.nan) for row in np.flatnonzero(fires)])
            if op == _COUNTS[-1]:
                free = np.ones(len(table), np.bool_)
        return found


def _covered(rule: AnomalyRule, kinds: pa.ChunkedArray, op: str) -> npt.NDArray[np.bool_]:
    covered_kinds = [kind for kind in kinds.unique().to_pylist() if rule.judges(kind, op)]
    return np.asarray(pc.is_in(kinds, pa.array(covered_kinds, pa.string())).to_numpy())


def _firing_events(table: pa.Table, op: str, firings: Sequence[tuple[int, AnomalyRule, float]]) -> list[pa.Table]:
    """Return anomaly events for the firings, one table per rule.

    A firing is a triple: the number of a row, the rule that fires, and the baseline before this row.
    """
    found = []
    for rule in dict.fromkeys(rule for _, rule, _ in firings):
        chosen = [(row, baseline) for row, other, baseline in firings if other is rule]
        rows = table.take(pa.array([row for row, _ in chosen], pa.int64()))
        value = rows.column(op).cast(pa.float64())
        kind, tensor = (rows.column(name).cast(pa.string()) for name in ("kind", "tensor"))
        message = pc.binary_join_element_wise(
            f"{rule.name} on ", kind, " of ", tensor, f": {op} is ", value.cast(pa.string()), ""
        )
        columns = {
            "kind": kind,
            "tensor": tensor,
            "op": pa.array([op] * len(chosen)),
            "value": value,
            "baseline": pa.array([_known(baseline) for _, baseline in chosen], pa.float64()),
            "vpp_stage": rows.column("vpp_stage"),
            "message": message,
        }
        found.append(_events(rows, rule, columns))
    return found


def _events(rows: pa.Table, rule: AnomalyRule, columns: Mapping[str, Any]) -> pa.Table:
    """Return one anomaly event of `rule` per row of `rows`, with the values in `columns`.

    Run, attempt, rank, step and time are those of the row. Event columns without a value are null.
    """
    count = rows.num_rows
    given = {name: rows.column(name) for name in _PLACE} | dict(columns)
    same = {"type": EventType.ANOMALY.value, "severity": str(rule.severity), "rule": rule.name}
    given |= {name: pa.array([value] * count) for name, value in same.items()}
    given["threshold"] = pa.array([rule.limit()] * count, pa.float64())
    schema = table_schema("events")
    arrays = [
        given[field.name].cast(field.type) if field.name in given else pa.nulls(count, field.type) for field in schema
    ]
    return pa.table(arrays, schema=schema)


def _known(baseline: float) -> float | None:
    return None if math.isnan(baseline) else baseline
