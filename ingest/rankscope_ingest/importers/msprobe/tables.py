"""Convert the rows of msprobe's CSV files into tables of the store, with statistics as Rankscope defines them.

msprobe computes norm, min, max and mean over *all* elements, so one NaN makes them `nan`. It also writes `nan` for a
tensor that was absent. Rankscope computes statistics over finite elements and counts NaN and Inf. Therefore:

- If a row consists of `nan` only, and its shape is `nan` too, the tensor was absent, and no row is stored. In a file
  without shapes, the tensor was absent if its count of NaN is `nan` too. In a file with neither column, the row is
  stored as a tensor with NaN: a false alarm is better than an undetected NaN.
- A statistic that is not finite becomes null, because its value without the NaN is unknown.
- `nans` is msprobe's count of NaN. If it was not collected, a finite norm means 0, and a norm that is not finite means
  at least 1; this lower bound is stored. The same holds for Inf, which msprobe never counts.
- msprobe's `zeros` is the share of elements below 1e-8. The store has the number of these elements: share times
  elements, rounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from rankscope_contract.model.kinds import VALUE_OPS
from rankscope_ingest.base.tables import table_schema
from rankscope_ingest.importers.common.importer import RECORD_COLUMN, Faults, ImportedBlock
from rankscope_ingest.importers.msprobe.csv_rows import CsvRows, Floats, Integers, Mask, read_header, read_rows
from rankscope_ingest.importers.msprobe.discovery import Named, is_tensor_family, parse_name
from rankscope_msprobe.files.csv_layout import CSV_KEYS, DIRECTION, FEATURES, OPS, OTHER, SCALARS, our_step, plain
from rankscope_storage.tensorboard.tags import labelled

MISALIGNED: Final = "a row of msprobe about communication, whose name, step and statistics are misaligned: not usable"

_PREFIXES: Final = ("torch.", "mindspore.")
_EQUAL_COLUMNS: Final = ("norm", "min", "max", "mean")
_SHAPE: Final = re.compile(r"(?:torch\.Size\()?[\[(]([\d,\s]*)[\])]\)?")
_MAX_DIMENSIONS: Final = 64
_MAX_ELEMENTS: Final = 1 << 62
_UNKNOWN: Final = -1

Tables = dict[str, pa.Table]


class FamilyReader:
    """Converts the files of one family (such as `actv`) of one rank. Files must be passed in the order of their steps.

    `repeats` is the largest number of times that a file repeats its steps. Each repetition is stored as another
    attempt, so the attempt numbers of the next launch must be higher than those of all repetitions.
    """

    def __init__(self, family: str, *, rank: int | None, attempt: int, source: str) -> None:
        self.repeats = 0
        self._family = family
        self._rank = rank
        self._attempt = attempt
        self._last = 0  # pass at the end of the previous file
        self._source = source
        self._described: set[tuple[str, str, int | None]] = set()

    def blocks(self, path: Path, faults: Faults) -> Iterator[ImportedBlock]:
        """Yield the rows of the file at `path` as blocks; record unreadable lines in `faults`."""
        faults.around = f"{path.parent.name}/{path.name}: ", ""
        if self._family not in {OTHER, SCALARS, *FEATURES} and not is_tensor_family(self._family):
            faults.add(1, f"msprobe has no file family {self._family!r}: the file is skipped")
        else:
            yield from self._blocks(path, faults)
        faults.around = "", ""

    def _blocks(self, path: Path, faults: Faults) -> Iterator[ImportedBlock]:
        if self._family == OTHER and set(CSV_KEYS).issubset(read_header(path)):
            faults.around = faults.around[0], f": {MISALIGNED}"
        # If a run continued after repeated steps, the following files belong to the same attempt.
        first = max(0, self._last - _repeats(path)) if self._last else 0
        self._last = first
        for rows in read_rows(path, faults):
            yield ImportedBlock(
                records=len(rows),
                tables=self._tables(rows, self._attempt + first, faults),
                source=f"{self._source}/{path.name}",
            )
            self._last = max(self._last, first + rows.repeats)
        self.repeats = max(self.repeats, self._last)

    def _tables(self, rows: CsvRows, attempt: int, faults: Faults) -> Tables:
        if self._family == OTHER:
            return self._directions(rows, attempt, faults)
        if self._family == SCALARS:
            return self._scalars(rows, attempt)
        named = [parse_name(self._family, name) for name in rows.names]
        known = np.array([found is not None for found in named], np.bool_)[rows.codes]
        for line, code in zip(rows.lines[~known].tolist(), rows.codes[~known].tolist(), strict=True):
            faults.add(line, f"the row name {rows.names[code]!r} names neither an input nor an output")
        tables = self._features if self._family in FEATURES else self._statistics
        return tables(rows.keep(known), [found or Named("", "") for found in named], attempt)

    def _statistics(self, rows: CsvRows, named: Sequence[Named], attempt: int) -> Tables:
        """Return the tables `tensor_stats` and `tensors` for `rows`.

        `tensor_stats` has the statistics. `tensors` describes each tensor once, with its first shape.
        """
        shapes = TensorShapes.of(rows.texts.get("shape"), len(rows))
        present, statistics = statistics_of(rows.numbers, shapes, has_shape="shape" in rows.texts)
        columns = {
            **self._common(rows, attempt, named[0].kind if named else None),
            "kind": rows.spread([found.kind for found in named], pa.string()),
            "tensor": rows.spread([found.tensor for found in named], pa.string()),
            "index": rows.spread([found.index for found in named], pa.int32()),
            "call_seq": rows.spread([found.call_seq for found in named], pa.int64()),
            **statistics,
        }
        tables = {"tensor_stats": pa.table(columns).filter(pa.array(present))}
        new = [code for code, found in enumerate(named) if found.described not in self._described]
        describing = np.flatnonzero(present & (shapes.codes >= 0) & np.isin(rows.codes, new))
        first_rows: dict[tuple[str, str, int | None], int] = {}
        for row in describing[np.sort(np.unique(rows.codes[describing], return_index=True)[1])].tolist():
            first_rows.setdefault(named[rows.codes[row]].described, row)
        if first_rows:
            self._described |= first_rows.keys()
            positions = sorted(first_rows.values())
            chosen = [(row, named[rows.codes[row]], shapes.at(row)) for row in positions]
            dtypes = rows.texts["dtype"].take(pa.array(positions)) if "dtype" in rows.texts else None
            tables["tensors"] = _descriptions(chosen, columns, dtypes)
        return tables

    def _features(self, rows: CsvRows, named: Sequence[Named], attempt: int) -> Tables:
        """Return the table `features`, with one row for each value column of each row of the file.

        NaN is stored as a value, because msprobe writes only rows that it has computed.
        """
        common = {
            **self._common(rows, attempt, None),
            "module": rows.spread([found.tensor for found in named], pa.string()),
            "index": rows.spread([found.index for found in named], pa.int32()),
        }
        parts = []
        for column, kind in FEATURES[self._family].columns.items():
            if column in rows.numbers:
                value = pa.array(rows.numbers[column], pa.float32())
                parts.append(pa.table({**common, "kind": pa.repeat(kind, len(rows)), "value": value}))
        if len(parts) > 1:
            parts = [pa.concat_tables(parts, promote_options="default").sort_by(RECORD_COLUMN)]
        return {"features": parts[0]} if parts else {}

    def _directions(self, rows: CsvRows, attempt: int, faults: Faults) -> Tables:
        """Return the table `features` with the agreement of gradient and momentum in direction, one number per row.

        Files of the family `other` repeat this number in each statistics column. A row of which the columns differ is
        reported and not stored.
        """
        values = [rows.numbers[op] for op in _EQUAL_COLUMNS if op in rows.numbers]
        if not values:
            return {}
        with np.errstate(invalid="ignore"):
            same = np.all([(value == values[0]) | (np.isnan(value) & np.isnan(values[0])) for value in values], axis=0)
        for line in rows.lines[~same].tolist():
            faults.add(line, "its statistics differ")
        rows = rows.keep(same)
        columns = {
            **self._common(rows, attempt, None),
            "kind": pa.repeat(DIRECTION, len(rows)),
            "module": rows.spread(rows.names, pa.string()),
            "value": pa.array(values[0][same], pa.float32()),
        }
        return {"features": pa.table(columns)}

    def _scalars(self, rows: CsvRows, attempt: int) -> Tables:
        """Return the table `scalars`, with one row for each row of the file.

        A name in the file ends in the labels of the scalar, if it has any. The labels have a column of their own, so
        they are removed from the name.
        """
        none = pa.array([None] * len(rows), pa.string())
        texts = {name: rows.texts.get(name, none).to_pylist() for name in ("unit", "labels")}
        names = [
            rows.names[code].removesuffix(labelled("", labels or None))
            for code, labels in zip(rows.codes.tolist(), texts["labels"], strict=True)
        ]
        columns = {
            **self._common(rows, attempt, None),
            "vpp_stage": pa.array(rows.vpp.astype(np.int32), mask=rows.vpp <= 0),  # 0 is written for no stage
            "name": pa.array(names, pa.string()),
            "unit": pa.array([plain(text) if text else None for text in texts["unit"]], pa.string()),
            "labels": pa.array([text or None for text in texts["labels"]], pa.string()),
            "value": pa.array(rows.numbers.get("value", np.full(len(rows), math.nan)), pa.float64()),
        }
        return {"scalars": pa.table(columns)}

    def _common(self, rows: CsvRows, attempt: int, kind: str | None) -> dict[str, pa.Array]:
        columns = {
            RECORD_COLUMN: pa.array(rows.records, pa.int32()),
            "step": pa.array(rows.steps + our_step(kind, 0)),
            "attempt": pa.array((attempt + rows.passes).astype(np.int32)),
            "vpp_stage": pa.array(rows.vpp.astype(np.int32), mask=rows.vpp < 0),
            "micro_step": pa.array(rows.micro.astype(np.int32), mask=rows.micro < 0),
        }
        if self._rank is not None:
            columns["rank"] = pa.array(np.full(len(rows), self._rank, np.int32))
        return columns


def _repeats(path: Path) -> int:
    """Return the number of times that the file at `path` repeats its steps; 0 if it contains each step once."""
    return max((rows.repeats for rows in read_rows(path, Faults())), default=0)


def _descriptions(
    chosen: Sequence[tuple[int, Named, tuple[int, ...] | None]],
    columns: Mapping[str, pa.Array],
    dtypes: pa.Array | None,
) -> pa.Table:
    """Return a table with one row of the dataset `tensors` for each (row number, name, shape) in `chosen`."""
    schema = table_schema("tensors")
    own = {
        "shape": [shape for _, _, shape in chosen],
        "numel": [math.prod(shape or ()) for _, _, shape in chosen],
        "module": [named.module for _, named, _ in chosen],
        "dtype": [None] * len(chosen) if dtypes is None else [_dtype(text) for text in dtypes.to_pylist()],
    }
    positions = pa.array([row for row, _, _ in chosen], pa.int64())
    kept = (RECORD_COLUMN, "step", "rank", "attempt", "vpp_stage", "kind", "tensor", "index")
    taken = {name: columns[name].take(positions) for name in kept if name in columns}
    return pa.table({**taken, **{name: pa.array(values, schema.field(name).type) for name, values in own.items()}})


def _dtype(text: str) -> str | None:
    for prefix in _PREFIXES:
        text = text.removeprefix(prefix)
    return None if text in {"nan", ""} else text


@dataclass(frozen=True, slots=True)
class TensorShapes:
    """The tensor shapes of rows.

    `known` has the distinct shapes. `codes` has, for each row, the index of the shape of the row in `known`, or -1 for
    a row without a shape.
    """

    codes: Integers
    known: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, column: pa.StringArray | None, rows: int) -> TensorShapes:
        """Return the shapes in `column`. Each distinct text is parsed only once."""
        if column is None:
            return cls(np.full(rows, _UNKNOWN, np.int64), ())
        encoded = column.dictionary_encode()
        parsed = [_shape(text) for text in encoded.dictionary.to_pylist()]
        known = tuple(shape for shape in parsed if shape is not None)
        numbers = iter(range(len(known)))
        codes = np.array([_UNKNOWN if shape is None else next(numbers) for shape in parsed], np.int64)
        return cls(codes[encoded.indices.to_numpy()], known)

    def at(self, row: int) -> tuple[int, ...] | None:
        """Return the shape of the row with the number `row`; None without a shape."""
        code = int(self.codes[row])
        return None if code == _UNKNOWN else self.known[code]

    def elements(self) -> Integers:
        """Return the number of elements of the tensor of each row; -1 without a shape."""
        counts = np.array([*(math.prod(shape) for shape in self.known), _UNKNOWN], np.int64)
        return np.asarray(counts[self.codes])


def _shape(text: str | None) -> tuple[int, ...] | None:
    match = _SHAPE.fullmatch((text or "").strip())
    texts = [size for one in match[1].split(",") if (size := one.strip())] if match else [""]
    if not all(map(str.isdecimal, texts)):
        return None
    sizes = tuple(int(size[:20]) for size in texts)
    return sizes if len(sizes) <= _MAX_DIMENSIONS and math.prod(sizes) < _MAX_ELEMENTS else None


def statistics_of(
    given: Mapping[str, Floats], shapes: TensorShapes, *, has_shape: bool
) -> tuple[Mask, dict[str, pa.Array]]:
    """Return a boolean array that marks the rows of which the tensor was present, and columns of `tensor_stats`.

    The columns have a value for every row. `given` has the collected statistics as arrays; `has_shape` states whether
    the file has a column of shapes.
    """
    known = {op: values for op, values in given.items() if op in OPS}
    values = [known[op] for op in VALUE_OPS if op in known]
    numel = shapes.elements()
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
        usable = np.isfinite(known["zeros"]) & (numel >= 0)
        zeros = np.rint(np.where(usable, known["zeros"], 0) * np.maximum(numel, 0)).astype(np.int64)
        columns["zeros"] = pa.array(zeros, mask=~usable)
    columns["numel"] = pa.array(numel, mask=numel < 0)
    has_number = _any(known.values(), lambda column: ~np.isnan(column), len(numel))
    if has_shape:
        return has_number | (numel >= 0), columns
    return has_number if "nans" in known else np.ones(len(numel), np.bool_), columns


def _nans(known: Mapping[str, Floats], values: Sequence[Floats], numel: Integers) -> tuple[Integers, Mask]:
    """Return a lower bound of the number of NaN in each tensor, and whether each bound is known, as two arrays.

    One NaN makes every statistic NaN, so a statistic that is not NaN proves that the number is 0.
    """
    none = _any(values, lambda column: ~np.isnan(column), len(numel)) | (numel == 0)
    least = np.where(none, 0, 1)
    sure = none | bool(values)
    counted = known.get("nans")
    if counted is None:
        return least, np.asarray(sure)
    usable = np.isfinite(counted) & (counted >= 0) & (counted < _MAX_ELEMENTS)
    return np.where(usable, counted, least).astype(np.int64), np.asarray(usable | sure)


def _infs(
    known: Mapping[str, Floats], values: Sequence[Floats], nans: Integers, numel: Integers
) -> tuple[Integers, Mask]:
    """Return a lower bound of the number of Inf in each tensor, and whether each bound is known, as two arrays."""
    finite: Mask = numel == 0  # where the statistics show that every element is finite
    for op in ("norm", "mean"):
        if op in known:
            finite = finite | np.isfinite(known[op])
    seen = _any(values, np.isinf, len(numel))
    both: Mask | bool = False
    if {"min", "max"} <= known.keys():
        finite = finite | (np.isfinite(known["min"]) & np.isfinite(known["max"]))
        both = seen & np.isneginf(known["min"]) & np.isposinf(known["max"])
    # If there is a NaN, every statistic is NaN, and the count of Inf is unknown.
    return np.where(seen, 1 + both, 0).astype(np.int64), np.asarray(seen | (finite & (nans == 0)))


def _any(columns: Iterable[Floats], predicate: Callable[[Floats], Mask], rows: int) -> Mask:
    found = np.zeros(rows, np.bool_)
    for column in columns:
        found |= predicate(column)
    return found
