"""The rules over what is imported, with the reference evaluator: the same events as if the rank had judged itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.events import EventType
from rankscope_contract.model.kinds import JUDGED_OPS, VALUE_OPS, Kind
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.reference import SeriesEvaluator
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_ingest.base.tables import table_schema

IMPORT_RULES: Final[tuple[AnomalyRule, ...]] = (
    AnomalyNan(),
    AnomalyTurbulence(threshold=10.0, kinds=(Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED), ops=("norm",)),
)
"""What a rank judges by unless told otherwise."""

_SERIES: Final = ("rank", "attempt", "vpp_stage", "micro_step", "kind", "tensor", "index", "call_seq")
_PLACE: Final = ("run", "attempt", "rank", "incarnation", "seq", "ordinal", "step", "micro_step", "ts", "ts_origin")
_COUNTS: Final = ("nans", "infs")


class Judge:
    """Judges tables in the order of the log, and keeps the baseline of each series meanwhile."""

    def __init__(self, rules: Sequence[AnomalyRule]) -> None:
        self._rules = tuple(rules)
        self._series: dict[tuple[Any, ...], tuple[SeriesEvaluator, ...]] = {}

    def judge(self, tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
        """Return the tables with baselines where they had none, and with an event for each firing."""
        judged = dict(tables)
        found = []
        if "scalars" in tables:
            found += self._scalars(tables["scalars"])
        if "tensor_stats" in tables:
            judged["tensor_stats"], events = self._tensors(tables["tensor_stats"])
            found += events
        if found:
            events = [judged["events"], *found] if "events" in judged else found
            judged["events"] = pa.concat_tables([table.cast(table_schema("events")) for table in events])
        return judged

    def _scalars(self, table: pa.Table) -> list[pa.Table]:
        values = table.column("value").to_numpy()
        free = table.column("value").is_valid().to_numpy()
        found = []
        for rule in self._rules:
            if not rule.judges(None, "value"):
                continue
            fires = np.asarray(rule.fires("value", values, math.nan), np.bool_) & free
            free &= ~fires  # the first rule names the alert
            if fires.any():
                rows = table.filter(pa.array(fires))
                names = rows.column("name").cast(pa.string())
                said = pc.binary_join_element_wise(
                    f"{rule.name}: ", names, " is ", rows.column("value").cast(pa.string()), ""
                )
                found.append(_events(rows, rule, {"op": names, "value": rows.column("value"), "message": said}))
        return found

    def _tensors(self, table: pa.Table) -> tuple[pa.Table, list[pa.Table]]:
        found = self._stateless(table)
        given = [table.column(f"{op}_baseline") for op in JUDGED_OPS]
        if any(column.null_count < len(column) for column in given):
            return table, found
        keys = list(zip(*(table.column(name).to_pylist() for name in _SERIES), strict=True))
        for place, op in enumerate(JUDGED_OPS):
            values = table.column(op).to_pylist()
            shown: list[float | None] = []
            firings: list[tuple[int, AnomalyRule, float]] = []
            for row, (key, value) in enumerate(zip(keys, values, strict=True)):
                evaluator = self._evaluators(key)[place]
                before = evaluator.baseline
                firing = None if value is None else evaluator.observe(value)
                shown.append(_known(evaluator.baseline if math.isnan(before) else before))
                if firing is not None:
                    firings.append((row, firing.rule, firing.baseline))
            position = table.column_names.index(f"{op}_baseline")
            table = table.set_column(position, table.schema.field(position), pa.array(shown, pa.float32()))
            found += _fired(table, op, firings)
        return table, found

    def _evaluators(self, key: tuple[Any, ...]) -> tuple[SeriesEvaluator, ...]:
        known = self._series.get(key)
        if known is None:
            kind = key[_SERIES.index("kind")]
            known = tuple(SeriesEvaluator(self._rules, kind, op) for op in JUDGED_OPS)
            self._series[key] = known
        return known

    def _stateless(self, table: pa.Table) -> list[pa.Table]:
        """Return the firings that need no baseline; NaN and Inf of one tensor are one firing."""
        kinds = table.column("kind").cast(pa.string())
        found = []
        free = np.ones(len(table), np.bool_)
        for op in (*_COUNTS, *(op for op in VALUE_OPS if op not in JUDGED_OPS)):
            column = table.column(op).cast(pa.float64())
            values = column.to_numpy()
            open_rows = free & column.is_valid().to_numpy()
            for rule in self._rules:
                covered = self._covered(rule, kinds, op)
                fires = np.asarray(rule.fires(op, values, math.nan), np.bool_) & open_rows & covered
                open_rows &= ~fires
                if op in _COUNTS:
                    free &= ~fires
                firings = [(int(row), rule, math.nan) for row in np.flatnonzero(fires)]
                found += _fired(table, op, firings)
            if op == _COUNTS[-1]:
                free = np.ones(len(table), np.bool_)
        return found

    def _covered(self, rule: AnomalyRule, kinds: pa.ChunkedArray, op: str) -> npt.NDArray[np.bool_]:
        judged = [kind for kind in kinds.unique().to_pylist() if rule.judges(kind, op)]
        covered: npt.NDArray[np.bool_] = pc.is_in(kinds, pa.array(judged, pa.string())).to_numpy()
        return covered


def _fired(table: pa.Table, op: str, firings: Sequence[tuple[int, AnomalyRule, float]]) -> list[pa.Table]:
    """Return the events of firings (row, rule, baseline before), by rule."""
    found = []
    for rule in dict.fromkeys(rule for _, rule, _ in firings):
        mine = [(row, baseline) for row, other, baseline in firings if other is rule]
        rows = table.take(pa.array([row for row, _ in mine], pa.int64()))
        value = rows.column(op).cast(pa.float64())
        kind, tensor = (rows.column(name).cast(pa.string()) for name in ("kind", "tensor"))
        said = pc.binary_join_element_wise(
            f"{rule.name} on ", kind, " of ", tensor, f": {op} is ", value.cast(pa.string()), ""
        )
        own = {
            "kind": kind,
            "tensor": tensor,
            "op": pa.array([op] * len(mine)),
            "value": value,
            "baseline": pa.array([_known(baseline) for _, baseline in mine], pa.float64()),
            "vpp_stage": rows.column("vpp_stage"),
            "message": said,
        }
        found.append(_events(rows, rule, own))
    return found


def _events(rows: pa.Table, rule: AnomalyRule, own: Mapping[str, Any]) -> pa.Table:
    """Return anomaly events at the places of `rows`."""
    count = rows.num_rows
    given = {name: rows.column(name) for name in _PLACE} | dict(own)
    given["type"] = pa.array([EventType.ANOMALY.value] * count)
    given["severity"] = pa.array([str(rule.severity)] * count)
    given["rule"] = pa.array([rule.name] * count)
    given["threshold"] = pa.array([rule.limit()] * count, pa.float64())
    schema = table_schema("events")
    return pa.table([_cast(given.get(field.name), field, count) for field in schema], schema=schema)


def _cast(column: Any, field: pa.Field, count: int) -> Any:
    return pa.nulls(count, field.type) if column is None else column.cast(field.type)


def _known(baseline: float) -> float | None:
    return None if math.isnan(baseline) else baseline
