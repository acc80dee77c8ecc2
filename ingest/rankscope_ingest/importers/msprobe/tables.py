"""Rows of a family as tables of the store's datasets. Pure, but for what has been described already."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from rankscope_contract.msprobe.csv_layout import DIRECTION, FEATURES, OTHER, our_step
from rankscope_ingest.base.tables import table_schema
from rankscope_ingest.importers.common.importer import RECORD_COLUMN, Faults, ImportedBlock
from rankscope_ingest.importers.msprobe.csv_cells import Complain, read_cells, read_header
from rankscope_ingest.importers.msprobe.naming import Named, naming
from rankscope_ingest.importers.msprobe.rows import KEYS, Passes, Rows, read_rows
from rankscope_ingest.importers.msprobe.statistics import shapes, statistics

MISALIGNED: Final = "a communication row of the tool, whose name, step and statistics are misaligned: it is of no use"

_PREFIXES: Final = ("torch.", "mindspore.")
_SAME: Final = ("norm", "min", "max", "mean")

Tables = dict[str, pa.Table]


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose rows these are; `attempt` is that of the first pass."""

    rank: int | None
    attempt: int


Tabling = Callable[[Rows, Origin, Complain], Tables]


def tabling(family: str) -> Tabling | None:
    """Return how rows of `family` become tables; None for a family that the tool does not have."""
    if family == OTHER:
        return _directions
    if family in FEATURES:
        return lambda rows, origin, complain: _features(family, rows, origin, complain)
    return _Statistics(family) if naming(family) else None


class _Statistics:
    """Tensor statistics of one family; each tensor is described once, with its first shape."""

    def __init__(self, family: str) -> None:
        self._naming = naming(family)
        self._described: set[tuple[str, str, int | None]] = set()

    def __call__(self, rows: Rows, origin: Origin, complain: Complain) -> Tables:
        assert self._naming is not None  # `tabling` asked
        rows, named = _known(rows, [self._naming(name) for name in rows.names], complain)
        shaped = shapes(rows.texts.get("shape"), len(rows))
        said = statistics(rows.numbers, "shape" in rows.texts, shaped)
        steps = rows.steps + our_step(named[0].kind, 0) if named else rows.steps
        columns = {
            **_common(rows, origin),
            "step": pa.array(steps),
            "kind": rows.spread([one.kind for one in named], pa.string()),
            "tensor": rows.spread([one.tensor for one in named], pa.string()),
            "index": rows.spread([one.index for one in named], pa.int32()),
            "call_seq": rows.spread([one.call_seq for one in named], pa.int64()),
            **said.columns,
        }
        tables = {"tensor_stats": pa.table(columns).filter(pa.array(said.present))}
        fresh = [position for position, one in enumerate(named) if one.described not in self._described]
        described = said.present & (shaped.codes >= 0) & np.isin(rows.codes, fresh)
        if described.any():
            codes, first = np.unique(rows.codes[described], return_index=True)
            positions = np.sort(np.flatnonzero(described)[first])
            self._described |= {named[code].described for code in codes.tolist()}
            firsts = {named[rows.codes[row]].described: int(row) for row in positions[::-1]}
            positions = np.array(sorted(firsts.values()), np.int64)
            chosen = [(row, named[rows.codes[row]], shaped.of(row)) for row in positions.tolist()]
            dtypes = rows.texts["dtype"].take(pa.array(positions)) if "dtype" in rows.texts else None
            tables["tensors"] = _dimension(chosen, columns, dtypes)
        return tables


def _dimension(
    chosen: Sequence[tuple[int, Named, tuple[int, ...] | None]], columns: dict[str, pa.Array], dtypes: pa.Array | None
) -> pa.Table:
    """Return a row of `tensors` for each (row, name, shape) of `chosen`."""
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


def _features(family: str, rows: Rows, origin: Origin, complain: Complain) -> Tables:
    """One row for each column of the family; NaN is a value here, since a row is there only when it was computed."""
    read = naming(family)
    assert read is not None  # `tabling` asked
    rows, named = _known(rows, [read(name) for name in rows.names], complain)
    common = {
        **_common(rows, origin),
        "step": pa.array(rows.steps + our_step(None, 0)),
        "module": rows.spread([one.tensor for one in named], pa.string()),
        "index": rows.spread([one.index for one in named], pa.int32()),
    }
    parts = [
        pa.table({**common, "kind": _repeated(kind, len(rows)), "value": pa.array(rows.numbers[column], pa.float32())})
        for column, kind in FEATURES[family].columns.items()
        if column in rows.numbers
    ]
    return {"features": _by_record(parts)} if parts else {}


def _directions(rows: Rows, origin: Origin, complain: Complain) -> Tables:
    """`other` holds the agreement of gradient and momentum, one number written under every statistic."""
    values = [rows.numbers[op] for op in _SAME if op in rows.numbers]
    if not values:
        return {}
    with np.errstate(invalid="ignore"):
        same = np.all([(value == values[0]) | (np.isnan(value) & np.isnan(values[0])) for value in values], axis=0)
    for line in rows.lines[~same].tolist():
        complain(line, MISALIGNED)
    rows = rows.keep(same)
    columns = {
        **_common(rows, origin),
        "step": pa.array(rows.steps + our_step(None, 0)),
        "kind": _repeated(DIRECTION, len(rows)),
        "module": rows.spread(rows.names, pa.string()),
        "value": pa.array(values[0][same], pa.float32()),
    }
    return {"features": pa.table(columns)}


def _common(rows: Rows, origin: Origin) -> dict[str, pa.Array]:
    columns = {
        RECORD_COLUMN: pa.array(rows.records, pa.int32()),
        "attempt": pa.array((origin.attempt + rows.passes).astype(np.int32)),
        "vpp_stage": pa.array(rows.vpp.astype(np.int32), mask=rows.vpp < 0),
        "micro_step": pa.array(rows.micro.astype(np.int32), mask=rows.micro < 0),
    }
    if origin.rank is not None:
        columns["rank"] = pa.array(np.full(len(rows), origin.rank, np.int32))
    return columns


def _known(rows: Rows, named: Sequence[Named | None], complain: Complain) -> tuple[Rows, list[Named]]:
    """Return the rows whose name could be read, and the names; of the others, say so."""
    known = np.array([one is not None for one in named], np.bool_)[rows.codes]
    for line, code in zip(rows.lines[~known].tolist(), rows.codes[~known].tolist(), strict=True):
        complain(line, f"{rows.names[code]!r} names neither an input nor an output")
    return rows.keep(known), [one or Named("", "") for one in named]


def _repeated(text: str, rows: int) -> pa.StringArray:
    return pa.array([text], pa.string()).take(pa.array(np.zeros(rows, np.int32)))


def _by_record(parts: Sequence[pa.Table]) -> pa.Table:
    joined = pa.concat_tables(parts, promote_options="default")
    return joined if len(parts) == 1 else joined.sort_by(RECORD_COLUMN)


def _dtype(text: str) -> str | None:
    for prefix in _PREFIXES:
        text = text.removeprefix(prefix)
    return None if text in {"nan", ""} else text


class FamilyReader:
    """Reads the files of one family, to be given in the order of their steps.

    `deepest` is the greatest pass met, so that what follows can number its attempts behind it.
    """

    def __init__(self, family: str, *, rank: int | None, attempt: int, source: str) -> None:
        self.deepest = 0
        self._family = family
        self._tabling = tabling(family)
        self._rank = rank
        self._attempt = attempt
        self._last = 0  # pass at the end of the file before
        self._source = source

    def blocks(self, path: Path, faults: Faults) -> Iterator[ImportedBlock]:
        """Yield the rows of the file at `path`."""

        def complain(line: int, text: str) -> None:
            faults.add(line, f"{path.parent.name}/{path.name}: {text}")

        def misfit(line: int, text: str) -> None:
            complain(line, f"{text}: {MISALIGNED}" if self._family == OTHER else text)

        header = read_header(path)
        if missing := [name for name in KEYS if name not in header]:
            complain(1, f"no column {', '.join(missing)}: not a file of the tool's monitor")
            return
        if self._tabling is None:
            complain(1, f"the tool has no family {self._family}: the file is left out")
            return
        # A run that went on after steps it repeated is still that attempt in the files behind them.
        first = max(0, self._last - _repeats(path)) if self._last else 0
        origin = Origin(self._rank, self._attempt + first)
        passes = Passes()
        for cells in read_cells(path, faults, misfit):
            rows = read_rows(cells, misfit).told_apart_by(passes)
            yield ImportedBlock(
                records=len(rows),
                tables=self._tabling(rows, origin, complain),
                source=f"{self._source}/{path.name}",
            )
        self._last = first + passes.current
        self.deepest = max(self.deepest, self._last)


def _repeats(path: Path) -> int:
    """Return how often the file was begun again."""
    passes = Passes()
    for cells in read_cells(path, Faults(), _ignore):
        read_rows(cells, _ignore).told_apart_by(passes)
    return passes.current


def _ignore(_line: int, _text: str) -> None:
    """Take a complaint that is made when the rows are read."""
