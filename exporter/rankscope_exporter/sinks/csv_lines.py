"""Lines of CSV of one step, made of columns. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.msprobe.csv_layout import MICRO_STEP_FAMILIES, OPS, OTHER, TENSOR_COLUMNS
from rankscope_exporter.sinks.families import FEATURE_COLUMNS, FamilyRows, FeatureRow

_COMMA: Final = pa.scalar(",", pa.string())
_EMPTY: Final = pa.scalar("", pa.string())
_NAN: Final = pa.scalar("nan", pa.string())
_BRACKETS: Final = (pa.scalar("[", pa.string()), pa.scalar("]", pa.string()))

KEYS: Final = ("vpp_stage", "name", "step")


def header(columns: Sequence[str], *, micro_steps: bool) -> str:
    """Return the first line of a file."""
    return ",".join((*KEYS, *(("micro_step",) if micro_steps else ()), *columns)) + "\n"


class TensorLines:
    """The lines of one family of a plan; what does not change with the step is made once."""

    def __init__(self, rows: FamilyRows, ops: Sequence[str]) -> None:
        self.rows = rows
        micro_steps = rows.family in MICRO_STEP_FAMILIES or rows.has_micro_steps
        self.header = header((*ops, *TENSOR_COLUMNS[len(OPS) :]), micro_steps=micro_steps)
        self._ops = ops
        self._positions = pa.array(rows.positions, pa.int64())
        self._first = pa.array([f"{vpp},{quoted(name)}" for vpp, name, _ in rows.keys], pa.string())
        self._micro = pa.array([str(micro) for _, _, micro in rows.keys], pa.string()) if micro_steps else None
        self._numel = pa.array([elements for elements, _, _ in rows.described], pa.int64())
        self._shape = pa.array([quoted(shape) for _, shape, _ in rows.described], pa.string())
        self._dtype = pa.array([quoted(dtype) for _, _, dtype in rows.described], pa.string())

    def at(self, step: int, numel: pa.Int64Array, printed: Mapping[str, pa.StringArray]) -> str:
        """Return the lines at the tool's `step`, of the columns of all the plan; empty where nothing is there."""
        places = self.rows.there(numel)
        if not len(places):
            return ""
        whole = len(places) == len(self._first)
        mine = [
            part if whole or part is None else part.take(places) for part in (self._first, self._micro, self._dtype)
        ]
        first, micro, dtype = mine
        positions = self._positions if whole else self._positions.take(places)
        parts = [first, pa.scalar(str(step), pa.string()), *(() if micro is None else (micro,))]
        parts += [printed[op].take(positions) for op in self._ops]
        return _lines([*parts, self._shapes(places, numel.take(positions)), dtype])

    def _shapes(self, places: pa.Int64Array, numel: pa.Int64Array) -> pa.StringArray:
        """Return the shapes; one that does not fit (another batch) would tell a wrong number of elements."""
        shape, fits = self._shape.take(places), pc.equal(self._numel.take(places), numel)
        if pc.all(fits).as_py():
            return shape
        opened, closed = _BRACKETS
        flat = pc.binary_join_element_wise(opened, numel.cast(pa.string()), closed, _EMPTY)
        return pc.if_else(fits, shape, flat)


def feature_header(family: str, ops: Sequence[str]) -> str:
    """Return the first line of a file of features."""
    columns = (*ops, *TENSOR_COLUMNS[len(OPS) :]) if family == OTHER else tuple(FEATURE_COLUMNS[family])
    return header(columns, micro_steps=family in MICRO_STEP_FAMILIES)


def feature_lines(family: str, rows: Sequence[FeatureRow], step: int, ops: Sequence[str], digits: int | None) -> str:
    """Return the lines of a family of features at the tool's `step`."""
    parts = [
        pa.array([str(row.vpp_stage) for row in rows], pa.string()),
        pa.array([quoted(row.name) for row in rows], pa.string()),
        pa.scalar(str(step), pa.string()),
    ]
    if family in MICRO_STEP_FAMILIES:
        parts.append(pa.array([str(row.micro_step) for row in rows], pa.string()))
    numbers = {
        column: pa.array([row.numbers.get(column, float("nan")) for row in rows], pa.float32())
        for column in FEATURE_COLUMNS[family]
    }
    if family == OTHER:
        return _lines([*parts, *_as_statistics(numbers["norm"], ops, digits)])
    return _lines([*parts, *(texts(column, digits) for column in numbers.values())])


def _as_statistics(value: pa.FloatArray, ops: Sequence[str], digits: int | None) -> list[pa.Array]:
    """Return what the tool writes for one number: it passes it through every statistic."""
    text = texts(value, digits)
    none, all_, zero = (pa.scalar(text, pa.string()) for text in ("0.0", "1.0", "0"))
    constant = {"nans": zero, "zeros": pc.if_else(pc.equal(value, pa.scalar(0.0, pa.float32())), all_, none)}
    described = (pa.scalar(text, pa.string()) for text in ("[]", "torch.float32"))
    return [*(constant.get(op, text) for op in ops), *described]


def texts(numbers: pa.Array, digits: int | None) -> pa.StringArray:
    """Return numbers as the shortest text that reads back to the very number, or with so many decimals at most."""
    if pa.types.is_integer(numbers.type):
        return pc.fill_null(numbers.cast(pa.string()), _NAN)
    if digits is not None:
        numbers = pc.round(numbers.cast(pa.float64()), digits)
    return pc.replace_substring_regex(numbers.cast(pa.string()), r"^(-?\d+)$", r"\1.0")


def quoted(cell: str) -> str:
    """Return a cell as it is in a line."""
    return '"' + cell.replace('"', '""') + '"' if any(sign in cell for sign in ',"\n') else cell


def _lines(parts: Sequence[pa.Array | pa.Scalar]) -> str:
    lines = pc.binary_join_element_wise(*parts, _COMMA)
    return "\n".join(lines.to_pylist()) + "\n"
