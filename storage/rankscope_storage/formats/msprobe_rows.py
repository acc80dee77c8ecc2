"""Rows of one rank as msprobe writes them, as text: step numbers, names, and statistics over *all* elements.

A value that cannot be derived from the stored numbers is `nan`, never an estimate. The norm of a tensor with a NaN is
NaN. The norm of a tensor with an Inf is Inf; its min and max are `nan`, because the sign of the Inf is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_msprobe.files.csv_layout import (
    CALLS,
    DIRECTION,
    FEATURES,
    FLOAT_OPS,
    MOMENTS,
    OPS,
    OTHER,
    SCALAR_COLUMNS,
    TENSOR_COLUMNS,
    TENSOR_FAMILIES,
    dtype_text,
    feature_name,
    neutral,
    row_name,
)
from rankscope_storage.base.escaping import sql_identifier, sql_string
from rankscope_storage.connection import Connection
from rankscope_storage.formats.export import Selection
from rankscope_storage.tensorboard.tags import labelled

_MOMENTS: Final = ", ".join(map(sql_string, MOMENTS))

# msprobe keeps of several rows with one name the last call; a row of a micro-batch has priority over one of the step.
_LAST: Final = (
    "QUALIFY row_number() OVER (PARTITION BY step, {key}, coalesce(micro_step, 0) "
    "ORDER BY micro_step IS NULL, {call}ordinal DESC NULLS LAST, seq DESC NULLS LAST) = 1"
)


_LATEST: Final = (
    "(step, coalesce(attempt, 0)) IN "
    "(SELECT (step, max(coalesce(attempt, 0))) FROM {relation} WHERE run = $run AND step IS NOT NULL GROUP BY step)"
)


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream: the rows of one rank that are written to one folder.

    They are the rows of one attempt, or if `attempt` is None, the rows of the latest attempt of each step.
    """

    folder: Path
    rank: int
    attempt: int | None

    def only(self, selection: Selection, dataset: str) -> str:
        """Return the SQL predicate for the rows of `dataset` that are written to the folder of this stream.

        Rows without a rank belong to rank 0.
        """
        rank = f"coalesce(rank, 0) = {self.rank}"
        if self.attempt is not None:
            return f"{rank} AND coalesce(attempt, 0) = {self.attempt}"
        relation = selection.connection.relation(dataset, run=selection.run)
        return f"{rank} AND {_LATEST.format(relation=relation)}"


@dataclass(frozen=True, slots=True)
class MsprobeSteps:
    """Conversion of step numbers: the first step is 0 in msprobe, and `first` in the run."""

    first: int

    @classmethod
    def of(cls, connection: Connection, run: str) -> MsprobeSteps:
        """Return the conversion of step numbers for `run`.

        The first step of the run counts as 0 if the run has a step 0, otherwise as 1, which is the exporter's default.
        The scalars determine the first step of a run without statistics of tensors.
        """
        for dataset, kinds in (("tensor_stats", f"kind NOT IN ({_MOMENTS})"), ("scalars", "true")):
            for first, steps in ((0, (0, 0)), (1, None)):
                rows = connection.query(
                    f"SELECT 1 FROM {connection.relation(dataset, run=run, steps=steps)} "
                    f"WHERE run = $run AND step {'= 0' if steps else '> 0'} AND {kinds} LIMIT 1",
                    {"run": run},
                )
                if rows.num_rows:
                    return cls(first)
        return cls(1)

    def sql(self, *, moments: bool) -> str:
        """Return an SQL expression over `step` for msprobe's step number.

        msprobe reads Adam's moments *before* the optimizer's step. With `moments`, the step number is therefore one
        higher than for other statistics.
        """
        return f"(step - {self.first - 1 if moments else self.first})"


@dataclass(frozen=True, slots=True)
class MsprobeCells:
    """Rows of an msprobe CSV file or table as text columns, in the order of their steps.

    Only `step` is a column of integers.
    """

    step: pa.Int64Array
    vpp_stage: pa.StringArray
    name: pa.StringArray
    micro_step: pa.StringArray
    columns: Mapping[str, pa.StringArray]

    def __len__(self) -> int:
        return len(self.step)

    def slice(self, start: int, count: int) -> MsprobeCells:
        """Return `count` of the rows, from the row number `start`."""
        return MsprobeCells(
            self.step.slice(start, count),
            self.vpp_stage.slice(start, count),
            self.name.slice(start, count),
            self.micro_step.slice(start, count),
            {name: column.slice(start, count) for name, column in self.columns.items()},
        )


@dataclass(frozen=True, slots=True)
class Described:
    """Shape and dtype of a tensor as msprobe writes them, and its number of elements."""

    shape: str = "nan"
    dtype: str = "nan"
    numel: int | None = None


Descriptions = Mapping[tuple[str, str, int | None], Described]


def descriptions(connection: Connection, run: str) -> Descriptions:
    """Return shape, dtype and number of elements of each tensor of `run`, by kind, name and index."""
    rows = connection.query('SELECT kind, tensor, "index", shape, dtype FROM tensors WHERE run = $run', {"run": run})
    return {(row["kind"], row["tensor"], row["index"]): _described(row) for row in rows.to_pylist()}


def tensor_cells(
    selection: Selection, family: str, only: str, numbering: MsprobeSteps, described: Descriptions
) -> Iterator[MsprobeCells]:
    """Yield the rows of a family of tensor statistics that satisfy the predicate `only`, in batches of limited size."""
    kinds = ", ".join(map(sql_string, TENSOR_FAMILIES[family]))
    step = numbering.sql(moments=TENSOR_FAMILIES[family][0] in MOMENTS)
    mine = f"{only} AND kind IN ({kinds}) AND {step} >= 0"
    texts = statistics_sql(selection.options.seed_rounding)
    listed = ", ".join(f"{sql} AS {sql_identifier(op)}" for op, sql in texts.items())
    key, call = 'coalesce(vpp_stage, 0), kind, tensor, "index"', "NULL::BIGINT"
    if TENSOR_FAMILIES[family][0] in CALLS:
        key, call = f"{key}, call_seq", "call_seq"
    last = _LAST.format(key=key, call="call_seq DESC NULLS LAST, ")
    for first_step, last_step in selection.windows("tensor_stats", mine):
        window = selection.within(first_step, last_step)
        rows = window.query(
            f'SELECT {step} AS msprobe_step, {_KEY}, kind, tensor, "index", {call} AS call, numel, {listed} '
            f"FROM {window.source('tensor_stats')} AND {mine} {last} "
            'ORDER BY step, seq, micro_step, vpp_stage, tensor, kind, call_seq NULLS FIRST, "index"'
        )
        yield _tensor_cells(rows.combine_chunks(), described)


def feature_cells(selection: Selection, family: str, only: str, numbering: MsprobeSteps) -> Iterator[MsprobeCells]:
    """Yield the rows of an msprobe family of features that satisfy the SQL predicate `only`.

    Features are numbers of a module that are no tensor statistics. Each feature of the family is a column. Rows are
    yielded in batches of limited size.
    """
    columns = FEATURE_COLUMNS[family]
    step = numbering.sql(moments=False)
    mine = f"{only} AND kind IN ({', '.join(map(sql_string, columns.values()))}) AND {step} >= 0"
    value = _text("value", selection.options.seed_rounding)
    texts = {
        column: f"coalesce(max({value}) FILTER (kind = {sql_string(kind)}), 'nan')" for column, kind in columns.items()
    }
    listed = ", ".join(f"{sql} AS {sql_identifier(column)}" for column, sql in texts.items())
    last = _LAST.format(key='coalesce(vpp_stage, 0), kind, module, "index"', call="")
    for first_step, last_step in selection.windows("features", mine):
        window = selection.within(first_step, last_step)
        rows = window.query(
            f'SELECT msprobe_step, vpp_text, micro_text, module, "index", {listed} FROM ('
            f"SELECT *, {step} AS msprobe_step, {_KEY} FROM {window.source('features')} AND {mine} {last}) "
            'GROUP BY msprobe_step, vpp_text, micro_text, module, "index" '
            'ORDER BY msprobe_step, min(seq), module, "index"'
        )
        yield _feature_cells(rows.combine_chunks(), family, columns)


def scalar_cells(selection: Selection, only: str, numbering: MsprobeSteps) -> Iterator[MsprobeCells]:
    """Yield the rows of scalars that satisfy the SQL predicate `only`, in batches of limited size."""
    step = numbering.sql(moments=False)
    mine = f"{only} AND {step} >= 0"
    value = f"coalesce({_text('value', selection.options.seed_rounding)}, 'nan') AS \"value\""
    last = _LAST.format(key="coalesce(vpp_stage, 0), name, labels", call="")
    for first_step, last_step in selection.windows("scalars", mine):
        window = selection.within(first_step, last_step)
        rows = window.query(
            f"SELECT {step} AS msprobe_step, {_KEY}, name, coalesce(unit, '') AS unit, coalesce(labels, '') AS labels, "
            f"{value} FROM {window.source('scalars')} AND {mine} {last} ORDER BY step, seq, micro_step, name, labels"
        )
        yield _scalar_cells(rows.combine_chunks())


def statistics_sql(rounding: int | None) -> dict[str, str]:
    """Return by op an SQL expression for the text of the statistic, over the columns of `tensor_stats`.

    `rounding` is the number of decimals; None keeps all digits.
    """
    unknown = "coalesce(nans, 0) > 0 OR coalesce(infs, 0) > 0"
    sql = {
        op: f"CASE WHEN {unknown} OR {sql_identifier(op)} IS NULL THEN 'nan' "
        f"ELSE {_text(sql_identifier(op), rounding)} END"
        for op in FLOAT_OPS
    }
    sql["norm"] = (
        "CASE WHEN coalesce(nans, 0) > 0 THEN 'nan' WHEN coalesce(infs, 0) > 0 THEN 'inf' WHEN numel = 0 THEN '0.0' "
        f"WHEN norm IS NULL THEN 'nan' ELSE {_text('norm', rounding)} END"
    )
    sql["nans"] = "coalesce(nans::VARCHAR, 'nan')"
    share = _text("(zeros::DOUBLE / numel)", rounding)
    sql["zeros"] = f"CASE WHEN zeros IS NULL OR coalesce(numel, 0) = 0 THEN 'nan' ELSE {share} END"
    return sql


FEATURE_COLUMNS: Final[dict[str, dict[str, str]]] = {
    **{family: features.columns for family, features in FEATURES.items()},
    OTHER: {"norm": DIRECTION},
}
"""By msprobe family of features: the columns of its CSV file, each with the kind of the feature in the column.

Features are numbers of a module that are no tensor statistics. The family OTHER has one feature, DIRECTION.
`_direction_columns` writes its value into the column of each statistic."""

_KEY: Final = "coalesce(vpp_stage, 0)::VARCHAR AS vpp_text, coalesce(micro_step, 0)::VARCHAR AS micro_text"


def _text(value: str, rounding: int | None) -> str:
    """Return an SQL expression for the number `value` as text.

    The text has `rounding` decimals, or if `rounding` is None, the shortest form that results in the same number.
    """
    return f"{value}::VARCHAR" if rounding is None else f"round({value}::DOUBLE, {rounding})::VARCHAR"


def _tensor_cells(rows: pa.Table, described: Descriptions) -> MsprobeCells:
    kinds, tensors, indices, calls = (rows.column(name) for name in ("kind", "tensor", "index", "call"))
    keys, spread = _distinct(kinds, tensors, indices, calls)
    known = [described.get(key[:3], Described()) for key in keys]
    numel = _array(rows, "numel")
    fits = pc.fill_null(pc.equal(spread([one.numel for one in known], pa.int64()), numel), False)
    # A shape that does not match `numel` (a shard, another batch) would give a wrong number of elements.
    flat = pc.binary_join_element_wise(pa.scalar("["), pc.cast(numel, pa.string()), pa.scalar("]"), "")
    shape = pc.if_else(fits, spread([one.shape for one in known], pa.string()), flat)
    columns = {op: _array(rows, op) for op in OPS}
    columns |= {"shape": pc.fill_null(shape, "nan"), "dtype": spread([one.dtype for one in known], pa.string())}
    names = spread([neutral(row_name(*key)) for key in keys], pa.string())
    return MsprobeCells(*_keys(rows, names), {name: columns[name] for name in TENSOR_COLUMNS})


def _feature_cells(rows: pa.Table, family: str, columns: Mapping[str, str]) -> MsprobeCells:
    keys, spread = _distinct(rows.column("module"), rows.column("module"), rows.column("index"))
    names = spread([neutral(feature_name(family, module, index)) for _, module, index, _ in keys], pa.string())
    texts = {column: _array(rows, column) for column in columns}
    if family == OTHER:
        texts = _direction_columns(texts["norm"])
    return MsprobeCells(*_keys(rows, names), texts)


def _scalar_cells(rows: pa.Table) -> MsprobeCells:
    tags = [
        neutral(labelled(name, labels or None))
        for name, labels in zip(rows["name"].to_pylist(), rows["labels"].to_pylist(), strict=True)
    ]
    columns = {name: _array(rows, name) for name in SCALAR_COLUMNS}
    columns["unit"] = pa.array(map(neutral, columns["unit"].to_pylist()), pa.string())
    return MsprobeCells(*_keys(rows, pa.array(tags, pa.string())), columns)


def _direction_columns(value: pa.StringArray) -> dict[str, pa.StringArray]:
    """Return msprobe's columns for one number per row, which msprobe writes like a tensor with one element."""
    zero = pc.equal(pc.cast(value, pa.float64()), 0.0)
    constant = {"nans": "0", "zeros": "0.0", "shape": "[]", "dtype": "torch.float32"}
    columns = {name: pa.array([constant.get(name, "")] * len(value), pa.string()) for name in TENSOR_COLUMNS}
    columns |= dict.fromkeys(FLOAT_OPS, value)
    return columns | {"zeros": pc.if_else(zero, "1.0", "0.0")}


def _keys(rows: pa.Table, names: pa.StringArray) -> tuple[pa.Array, pa.Array, pa.Array, pa.Array]:
    return _array(rows, "msprobe_step"), _array(rows, "vpp_text"), names, _array(rows, "micro_text")


def _distinct(
    kinds: pa.ChunkedArray, names: pa.ChunkedArray, indices: pa.ChunkedArray, calls: pa.ChunkedArray | None = None
) -> tuple[list[tuple[str, str, int | None, int | None]], Callable[[list[Any], pa.DataType], pa.Array]]:
    """Return the distinct keys (kind, name, index, call) of rows, and a function that expands values.

    The function gets a list with one value per key and returns an array with one value per row.
    """
    number = pc.fill_null(pc.cast(indices, pa.string()), "")
    call = pa.scalar("") if calls is None else pc.fill_null(pc.cast(calls, pa.string()), "")
    encoded = pc.binary_join_element_wise(kinds, number, call, names, "\0").combine_chunks().dictionary_encode()
    keys = []
    for text in encoded.dictionary.to_pylist():
        kind, index, seq, name = text.split("\0", 3)
        keys.append((kind, name, int(index) if index else None, int(seq) if seq else None))
    return keys, lambda values, type_: pa.array(values, type_).take(encoded.indices)


def _described(row: Mapping[str, Any]) -> Described:
    shape, dtype = row["shape"], row["dtype"]
    if dtype is None and not shape:
        return Described()
    text = "nan" if dtype is None else dtype_text(dtype)
    return Described(str(list(shape or ())), text, math.prod(shape or ()))


def _array(rows: pa.Table, column: str) -> pa.Array:
    return rows.column(column).combine_chunks()
