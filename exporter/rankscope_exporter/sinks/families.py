"""A measured step in the terms of the existing tool: its families, rows, names and statistics. Pure, and in columns.

What is written of a row at every step is worked out once for each plan; a step then costs a few Arrow kernels, which
leave the interpreter to the training. What our numbers cannot say in the tool's terms is `nan`, as in an export: beside
a NaN its norm is NaN, beside an Inf it is Inf, and min, max and mean are not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.kinds import COUNT_OPS, Kind
from rankscope_contract.model.schema import PlanEntry
from rankscope_contract.msprobe.csv_layout import (
    CALLS,
    DIRECTION,
    FEATURES,
    FLOAT_OPS,
    OPS,
    OTHER,
    TENSOR_FAMILIES,
    dtype_text,
    feature_name,
    neutral,
    row_name,
)
from rankscope_exporter.records.step_record import Statistics

FEATURE_COLUMNS: Final[dict[str, dict[str, str]]] = {
    **{family: dict(features.columns) for family, features in FEATURES.items()},
    OTHER: {"norm": DIRECTION},
}
"""Columns of the families of features, and the kind in each; `other` repeats its one number as every statistic."""

_FAMILY_OF: Final = {str(kind): family for family, kinds in TENSOR_FAMILIES.items() for kind in kinds}
_FAMILY_OF_FEATURE: Final = {kind: family for family, columns in FEATURE_COLUMNS.items() for kind in columns.values()}
_OF_MODULES: Final = (Kind.ACT_IN, Kind.ACT_OUT, Kind.ACT_GRAD_IN, Kind.ACT_GRAD_OUT)

# Typed, since Arrow looks for pandas and dateutil whenever it has to guess a type, at half a millisecond a step.
_NONE: Final = pa.scalar(0, pa.int64())
_NOTHING: Final = pa.scalar(0.0, pa.float32())
_NAN: Final = pa.scalar(math.nan, pa.float32())
_INF: Final = pa.scalar(math.inf, pa.float32())
_UNKNOWN: Final = pa.scalar(math.nan, pa.float64())
_FALSE: Final = pa.scalar(False, pa.bool_())

Shown = Callable[[str, bool], str]
"""Returns how a tensor or module is called in the output; True for a module."""


@dataclass(frozen=True, slots=True)
class FamilyRows:
    """The rows of one family in a plan, one beside the other; `positions` are theirs in the plan."""

    family: str
    kind: str
    positions: Sequence[int]
    keys: Sequence[tuple[int, str, int]]  # vpp_stage, name, micro_step: of equal ones the first that is there counts
    described: Sequence[tuple[int, str, str]]  # elements, shape, dtype
    has_micro_steps: bool
    has_rivals: bool  # whether any two keys are equal
    ops: frozenset[str]  # statistics that leave the rank, of any row

    def there(self, numel: pa.Int64Array) -> pa.Int64Array:
        """Return the places, within this family, of the rows that exist at a step with these numbers of elements.

        They come in the order of the plan.
        """
        mine = numel.take(pa.array(self.positions, pa.int64()))
        places = pc.indices_nonzero(pc.is_valid(mine)).cast(pa.int64())
        if not self.has_rivals:
            return places
        first: dict[tuple[int, str, int], int] = {}
        for place in places.to_pylist():
            first.setdefault(self.keys[place], place)
        return pa.array(sorted(first.values(), key=self.positions.__getitem__), pa.int64())


def family_rows(
    entries: Sequence[PlanEntry], shown: Shown, ops: Sequence[frozenset[str]] | None = None
) -> list[FamilyRows]:
    """Return the families of a plan, each with its rows in the order of the plan; `ops` is by entry, None for all."""
    members: dict[str, list[int]] = {}
    for position, entry in enumerate(entries):
        family = _FAMILY_OF.get(entry.kind)
        if family is not None:
            members.setdefault(family, []).append(position)
    published = {
        family: frozenset(OPS) if ops is None else frozenset().union(*(ops[position] for position in positions))
        for family, positions in members.items()
    }
    return [_one_family(family, listed, entries, shown, published[family]) for family, listed in members.items()]


def _one_family(
    family: str, positions: list[int], entries: Sequence[PlanEntry], shown: Shown, ops: frozenset[str]
) -> FamilyRows:
    keys = [_key(entries[position], shown) for position in positions]
    rivals = len(set(keys)) < len(keys)
    if rivals:  # the tool keeps the last call; a row of a micro-batch goes before one of the whole step
        order = sorted(range(len(keys)), key=lambda place: _rank(entries[positions[place]], place))
        positions, keys = [positions[place] for place in order], [keys[place] for place in order]
    return FamilyRows(
        family,
        entries[positions[0]].kind,
        tuple(positions),
        tuple(keys),
        tuple(_described(entries[position]) for position in positions),
        any(entries[position].micro_step is not None for position in positions),
        rivals,
        ops,
    )


def _rank(entry: PlanEntry, place: int) -> tuple[bool, int, int]:
    return entry.micro_step is None, -1 if entry.call_seq is None else -entry.call_seq, -place


def _key(entry: PlanEntry, shown: Shown) -> tuple[int, str, int]:
    name = entry.tensor if entry.kind in CALLS else shown(entry.tensor, entry.kind in _OF_MODULES)
    return entry.vpp_stage or 0, neutral(row_name(entry.kind, name, entry.index, entry.call_seq)), entry.micro_step or 0


def _described(entry: PlanEntry) -> tuple[int, str, str]:
    return math.prod(entry.shape), str(list(entry.shape)), dtype_text(entry.dtype) if entry.dtype else "nan"


def columns_of(statistics: Statistics) -> dict[str, pa.Array]:
    """Return the tool's statistics of every entry of the plan, and `numel`, null where the entry was absent.

    What was measured and does not leave the rank is not in them, but for what it says of the others: beside a NaN that
    nobody wanted counted, a norm is NaN.
    """
    plan = statistics.plan.plan
    size = len(plan.entries)
    counts = {op: statistics.counts.slice(plan.count_ops.index(op) * size, size) for op in COUNT_OPS}
    values = {op: statistics.values.slice(plan.value_ops.index(op) * size, size) for op in FLOAT_OPS}
    measured = statistics.counts if statistics.measured is None else statistics.measured
    seen = {op: measured.slice(plan.count_ops.index(op) * size, size) for op in ("nans", "infs")}
    has_nan, has_inf = (pc.fill_null(pc.greater(seen[op], _NONE), _FALSE) for op in ("nans", "infs"))
    spoilt = pc.or_(has_nan, has_inf)
    known = {op: pc.fill_null(pc.if_else(spoilt, _NAN, values[op]), _NAN) for op in FLOAT_OPS}
    norm = pc.if_else(pc.equal(counts["numel"], _NONE), _NOTHING, values["norm"])
    norm = pc.if_else(has_nan, _NAN, pc.if_else(has_inf, _INF, norm))
    share = pc.divide(counts["zeros"].cast(pa.float64()), counts["numel"].cast(pa.float64()))  # of nothing: 0 / 0
    others = {"nans": counts["nans"], "zeros": pc.fill_null(share, _UNKNOWN), "numel": counts["numel"]}
    return {**known, "norm": pc.fill_null(norm, _NAN), **others}


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """One row of a family of features: a number for each column that has one."""

    vpp_stage: int
    name: str
    micro_step: int
    numbers: Mapping[str, float]


def feature_rows(features: Iterable[Mapping[str, Any]], shown: Shown) -> dict[str, list[FeatureRow]]:
    """Return the rows of each family; numbers of one module and micro-batch stand side by side."""
    found: dict[str, dict[tuple[int, str, int], dict[str, float]]] = {}
    for row in features:
        family = _FAMILY_OF_FEATURE.get(row["kind"])
        if family is None:
            continue
        column = next(name for name, kind in FEATURE_COLUMNS[family].items() if kind == row["kind"])
        name = neutral(feature_name(family, shown(row["module"], family != OTHER), row.get("index")))
        key = row.get("vpp_stage") or 0, name, row.get("micro_step") or 0
        numbers = found.setdefault(family, {}).setdefault(key, {})
        if row["value"] is not None:
            numbers[column] = row["value"]
    return {family: [FeatureRow(*key, numbers) for key, numbers in rows.items()] for family, rows in found.items()}
