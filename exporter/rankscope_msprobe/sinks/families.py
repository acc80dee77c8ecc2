"""Converts a record to the rows that msprobe writes, as columns.

No I/O. The rows are grouped in the families of msprobe, with the names and statistics that msprobe uses. A family is a
group of tensors or features with common files. The parts of a row that are equal at every step are computed once per
plan. A step then costs a few Arrow kernels, which release the GIL for the training. A value that msprobe computes and
Rankscope does not know is `nan`, as in the CSV files that `rankscope export` writes. If a tensor contains a NaN, its
norm is NaN. If it contains an Inf and no NaN, its norm is Inf. In both cases, min, max and mean are unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.kinds import COUNT_OPS, Kind
from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.records.record import Statistics
from rankscope_msprobe.files import csv_layout as layout

FEATURE_COLUMNS: Final[dict[str, dict[str, str]]] = {
    **{family: dict(features.columns) for family, features in layout.FEATURES.items()},
    layout.OTHER: {"norm": layout.DIRECTION},
}
"""For each msprobe family of features, its columns and the kind of feature in each column.

A feature is a number that is not a tensor statistic, such as the entropy of attention. The family `other` has one
number per row, of which msprobe computes every statistic.
"""

_FAMILY_OF: Final = {str(kind): family for family, kinds in layout.TENSOR_FAMILIES.items() for kind in kinds}
_FAMILY_OF_FEATURE: Final = {kind: family for family, columns in FEATURE_COLUMNS.items() for kind in columns.values()}
_OF_MODULES: Final = (Kind.ACT_IN, Kind.ACT_OUT, Kind.ACT_GRAD_IN, Kind.ACT_GRAD_OUT)

# With types: to infer a type, Arrow looks for pandas and dateutil, which takes 0.5 ms per step.
_NONE: Final = pa.scalar(0, pa.int64())
_NOTHING: Final = pa.scalar(0.0, pa.float32())
_NAN: Final = pa.scalar(math.nan, pa.float32())
_INF: Final = pa.scalar(math.inf, pa.float32())
_UNKNOWN: Final = pa.scalar(math.nan, pa.float64())
_FALSE: Final = pa.scalar(False, pa.bool_())

T = TypeVar("T")
Naming = Callable[[str, bool], str]
"""Function of a name and a flag. It returns the output name of a tensor, or of a module if the flag is True."""


@dataclass(frozen=True, slots=True)
class FamilyRows:
    """The plan entries of one msprobe family (a group of tensors with common files), as one array per field.

    `positions` are their positions in the plan.
    """

    family: str
    kind: str
    positions: Sequence[int]
    keys: Sequence[
        tuple[int, str, int]
    ]  # vpp_stage, name, micro_step; of rows with equal keys, the first existing one counts
    described: Sequence[tuple[int, str, str]]  # number of elements, shape, dtype
    has_micro_steps: bool
    has_rivals: bool  # whether any two keys are equal
    ops: frozenset[str]  # published statistics of any row

    def there(self, numel: pa.Int64Array) -> pa.Int64Array:
        """Return the indices, within this family, of the rows with tensors that exist at a step.

        The indices are in the order of the plan. `numel` has the number of elements of every entry of the plan, or null
        for a tensor that does not exist.
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
    entries: Sequence[PlanEntry], naming: Naming, ops: Sequence[frozenset[str]] | None = None
) -> list[FamilyRows]:
    """Return the msprobe families of a plan, each with its rows.

    `ops` contains the published statistics of each entry of the plan. If `ops` is None, all statistics are published.
    """
    members: dict[str, list[int]] = {}
    for position, entry in enumerate(entries):
        family = _FAMILY_OF.get(entry.kind)
        if family is not None:
            members.setdefault(family, []).append(position)
    published = {
        family: frozenset(layout.OPS) if ops is None else frozenset().union(*(ops[position] for position in positions))
        for family, positions in members.items()
    }
    return [_one_family(family, listed, entries, naming, published[family]) for family, listed in members.items()]


def _one_family(
    family: str, positions: list[int], entries: Sequence[PlanEntry], naming: Naming, ops: frozenset[str]
) -> FamilyRows:
    keys = [_key(entries[position], naming) for position in positions]
    rivals = len(set(keys)) < len(keys)
    if rivals:  # msprobe keeps the last call; a row of a micro-batch precedes one of the whole step
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


def _key(entry: PlanEntry, naming: Naming) -> tuple[int, str, int]:
    name = entry.tensor if entry.kind in layout.CALLS else naming(entry.tensor, entry.kind in _OF_MODULES)
    return (
        entry.vpp_stage or 0,
        layout.neutral(layout.row_name(entry.kind, name, entry.index, entry.call_seq)),
        entry.micro_step or 0,
    )


def _described(entry: PlanEntry) -> tuple[int, str, str]:
    return math.prod(entry.shape), str(list(entry.shape)), layout.dtype_text(entry.dtype) if entry.dtype else "nan"


class PlannedRows(Generic[T]):
    """The rows of the current plan by msprobe family, in the form that the sink needs.

    The function `prepare` makes this form from the rows of a family and the names of its selected statistics. It is
    called once per plan and family.
    """

    def __init__(self, prepare: Callable[[FamilyRows, Sequence[str]], T], naming: Naming, ops: Sequence[str]) -> None:
        self._prepare = prepare
        self._naming = naming
        self.ops = ops
        self._plan = ""
        self._published: Sequence[frozenset[str]] | None = None
        self._prepared: Sequence[T] = ()

    def add_ops(self, ops: Sequence[str]) -> None:
        """Select more statistics, because the script publishes them from a later step on. Any thread may call this."""
        self.ops = (*ops, *(op for op in self.ops if op not in ops))

    def of(self, statistics: Statistics) -> Sequence[T]:
        """Call `prepare` for each msprobe family, with the rows of the family in the plan of `statistics`.

        Return the results, which are computed once per plan.
        """
        if statistics.plan.hash != self._plan or statistics.ops is not self._published:
            families = family_rows(statistics.plan.plan.entries, self._naming, statistics.ops)
            chosen = [(rows, [op for op in self.ops if op in rows.ops]) for rows in families]
            self._prepared = [self._prepare(rows, ops) for rows, ops in chosen if ops]
            self._plan, self._published = statistics.plan.hash, statistics.ops
        return self._prepared


def columns_of(statistics: Statistics) -> dict[str, pa.Array]:
    """Return msprobe's statistics of every entry of the plan, and `numel`, which is null for an absent tensor.

    Statistics that are measured and not published are used, but not returned. For example, the norm of a tensor with a
    NaN is NaN, even if the number of NaN values is not published.
    """
    plan = statistics.plan.plan
    size = len(plan.entries)
    counts = {op: statistics.counts.slice(plan.count_ops.index(op) * size, size) for op in COUNT_OPS}
    values = {op: statistics.values.slice(plan.value_ops.index(op) * size, size) for op in layout.FLOAT_OPS}
    measured = statistics.counts if statistics.measured is None else statistics.measured
    seen = {op: measured.slice(plan.count_ops.index(op) * size, size) for op in ("nans", "infs")}
    has_nan, has_inf = (pc.fill_null(pc.greater(seen[op], _NONE), _FALSE) for op in ("nans", "infs"))
    not_finite = pc.or_(has_nan, has_inf)
    known = {op: pc.fill_null(pc.if_else(not_finite, _NAN, values[op]), _NAN) for op in layout.FLOAT_OPS}
    norm = pc.if_else(pc.equal(counts["numel"], _NONE), _NOTHING, values["norm"])
    norm = pc.if_else(has_nan, _NAN, pc.if_else(has_inf, _INF, norm))
    share = pc.divide(counts["zeros"].cast(pa.float64()), counts["numel"].cast(pa.float64()))  # of nothing: 0 / 0
    others = {"nans": counts["nans"], "zeros": pc.fill_null(share, _UNKNOWN), "numel": counts["numel"]}
    return {**known, "norm": pc.fill_null(norm, _NAN), **others}


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """One row of an msprobe family of features.

    A feature is a number that is not a tensor statistic, such as the entropy of attention. `numbers` contains the
    values by column. A column without a value is missing in `numbers`.
    """

    vpp_stage: int
    name: str
    micro_step: int
    numbers: Mapping[str, float]


def feature_rows(features: Iterable[Mapping[str, Any]], naming: Naming) -> dict[str, list[FeatureRow]]:
    """Return the rows of each msprobe family of features.

    A feature is a number that is not a tensor statistic, such as the entropy of attention. Features of the same module
    and micro-batch become one row.
    """
    found: dict[str, dict[tuple[int, str, int], dict[str, float]]] = {}
    for row in features:
        family = _FAMILY_OF_FEATURE.get(row["kind"])
        if family is None:
            continue
        column = next(name for name, kind in FEATURE_COLUMNS[family].items() if kind == row["kind"])
        name = layout.neutral(
            layout.feature_name(family, naming(row["module"], family != layout.OTHER), row.get("index"))
        )
        key = row.get("vpp_stage") or 0, name, row.get("micro_step") or 0
        numbers = found.setdefault(family, {}).setdefault(key, {})
        if row["value"] is not None:
            numbers[column] = row["value"]
    return {family: [FeatureRow(*key, numbers) for key, numbers in rows.items()] for family, rows in found.items()}
