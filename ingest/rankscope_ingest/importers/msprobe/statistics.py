"""What the tool's statistics say in our terms. Pure: columns of numbers in, columns of ours out.

The tool takes norm, min, max and mean over *all* elements, so one NaN makes them `nan`; and it writes `nan` as well for
what was not there. Ours are over finite elements, with NaN and Inf counted apart. So:

- A row of nothing but `nan` whose shape (or, in files without shapes, whose count of NaN) is `nan` too is of a tensor
  that was absent: no row. In a file with neither column nothing tells the two apart, and the row is taken for NaN: a
  false alarm is better than a NaN that nobody saw.
- A statistic that is not finite is null: what it would be without the NaN is not known.
- `nans` is the tool's count. Where that was not collected, and for Inf, which the tool never counts, a finite norm says
  0, and one that is not finite "at least 1": the least number that is true is stored.
- `zeros` is a share of the elements below 1e-8, here their number: share times elements, rounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from rankscope_contract.model.kinds import VALUE_OPS
from rankscope_contract.msprobe.csv_layout import OPS
from rankscope_ingest.importers.msprobe.csv_cells import Floats, Integers, Mask

_SHAPE: Final = re.compile(r"(?:torch\.Size\()?[\[(]([\d,\s]*)[\])]\)?")
_MAX_DIMENSIONS: Final = 64
_MAX_ELEMENTS: Final = 1 << 62

_UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of rows: a number into `known` per row; -1 where there is none."""

    codes: Integers
    known: tuple[tuple[int, ...], ...]

    def of(self, row: int) -> tuple[int, ...] | None:
        """Return the shape of `row`."""
        code = int(self.codes[row])
        return None if code == _UNKNOWN else self.known[code]

    def elements(self) -> Integers:
        """Return the number of elements of each row, -1 where the shape is not known."""
        counts = np.array([*(math.prod(shape) for shape in self.known), _UNKNOWN], np.int64)
        return np.asarray(counts[self.codes])


def shapes(column: pa.StringArray | None, rows: int) -> Shapes:
    """Return the shapes in `column`, of which a few texts are repeated many times."""
    if column is None:
        return Shapes(np.full(rows, _UNKNOWN, np.int64), ())
    encoded = column.dictionary_encode()
    parsed = [_shape(text) for text in encoded.dictionary.to_pylist()]
    known = tuple(shape for shape in parsed if shape is not None)
    numbers = iter(range(len(known)))
    codes = np.array([_UNKNOWN if shape is None else next(numbers) for shape in parsed], np.int64)
    return Shapes(codes[encoded.indices.to_numpy()], known)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Columns of `tensor_stats`, and which rows are there at all."""

    present: Mask
    columns: dict[str, pa.Array]


def statistics(given: Mapping[str, Floats], has_shape: bool, shaped: Shapes) -> Statistics:  # noqa: FBT001 - a fact of the file
    """Return what the collected statistics in `given` say; a statistic that was not collected is not in it."""
    rows = len(shaped.codes)
    known = {op: values for op, values in given.items() if op in OPS}
    values = [known[op] for op in VALUE_OPS if op in known]
    numel = shaped.elements()
    present = _present(known, has_shape, numel, rows)
    nans, nans_known = _nans(known, values, numel)
    infs, infs_known = _infs(known, values, nans, numel)
    columns = {
        op: pa.array(column.astype(np.float32), mask=~np.isfinite(column) | (numel == 0))
        for op, column in known.items()
        if op in VALUE_OPS
    }
    columns["nans"] = pa.array(nans, mask=~nans_known)
    columns["infs"] = pa.array(infs, mask=~infs_known)
    if "zeros" in known:
        share = known["zeros"]
        usable = np.isfinite(share) & (numel >= 0)
        columns["zeros"] = pa.array(
            np.rint(np.where(usable, share, 0) * np.maximum(numel, 0)).astype(np.int64), mask=~usable
        )
    columns["numel"] = pa.array(numel, mask=numel < 0)
    return Statistics(present, columns)


def _present(known: Mapping[str, Floats], has_shape: bool, numel: Integers, rows: int) -> Mask:  # noqa: FBT001 - as above
    something = np.zeros(rows, np.bool_)
    for column in known.values():
        something |= ~np.isnan(column)
    if has_shape:
        return something | (numel >= 0)
    return something if "nans" in known else np.ones(rows, np.bool_)


def _nans(known: Mapping[str, Floats], values: list[Floats], numel: Integers) -> tuple[Integers, Mask]:
    """Return counts of NaN and where they are known. One NaN makes every statistic NaN, so any other number says 0."""
    none = _any(values, lambda column: ~np.isnan(column), len(numel)) | (numel == 0)
    least = np.where(none, 0, 1)
    sure = none | bool(values)
    counted = known.get("nans")
    if counted is None:
        return least, np.asarray(sure)
    there = np.isfinite(counted) & (counted >= 0) & (counted < _MAX_ELEMENTS)
    return np.where(there, counted, least).astype(np.int64), np.asarray(there | sure)


def _infs(known: Mapping[str, Floats], values: list[Floats], nans: Integers, numel: Integers) -> tuple[Integers, Mask]:
    """Return the least counts of Inf that are true, and where anything is known of them."""
    finite = _shown_finite(known, numel)
    seen = _any(values, np.isinf, len(numel))
    both = seen & (np.isneginf(known["min"]) & np.isposinf(known["max"]) if {"min", "max"} <= known.keys() else False)
    # Beside a NaN every statistic is NaN, and says nothing of Inf.
    return np.where(seen, 1 + both, 0).astype(np.int64), np.asarray(seen | (finite & (nans == 0)))


def _shown_finite(known: Mapping[str, Floats], numel: Integers) -> Mask:
    """Return where the statistics show that every element is finite."""
    shown: Mask = numel == 0
    for op in ("norm", "mean"):
        if op in known:
            shown = shown | np.isfinite(known[op])
    if {"min", "max"} <= known.keys():
        shown = shown | (np.isfinite(known["min"]) & np.isfinite(known["max"]))
    return shown


def _any(values: list[Floats], predicate: Callable[[Floats], Mask], rows: int) -> Mask:
    found = np.zeros(rows, np.bool_)
    for column in values:
        found |= predicate(column)
    return found


def _shape(text: str | None) -> tuple[int, ...] | None:
    match = _SHAPE.fullmatch((text or "").strip())
    if not match:
        return None
    sizes = tuple(int(size[:20]) for size in match[1].replace(" ", "").split(",") if size)
    return sizes if len(sizes) <= _MAX_DIMENSIONS and math.prod(sizes) < _MAX_ELEMENTS else None
