"""Collects what importers find, row by row, into columns: a block costs the store a tenth of as many records."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from rankscope_ingest.importers.base import RECORD_COLUMN, ImportedBlock
from rankscope_ingest.tables import table_schema

BLOCK_ROWS: Final = 200_000

_COMMON: Final = ("step", "rank", "ts", "ts_origin", "attempt")
_OWN: Final = {"scalars": ("name", "value", "unit", "labels"), "events": ("type", "severity", "message", "details")}


class BlockBuilder:
    """Scalars and events of the records of one source, in their order."""

    def __init__(self, source: str = "") -> None:
        self._source = source
        self._common: tuple[Any, ...] = ()
        self._begin()

    @property
    def is_full(self) -> bool:
        """Whether the block is worth storing."""
        return self._rows >= BLOCK_ROWS or self._records >= BLOCK_ROWS

    def record(
        self, *, step: int | None = None, rank: int | None = None, ts: int | None = None, origin: str, attempt: int = 0
    ) -> None:
        """Begin the next record; what is added belongs to it."""
        self._common = (self._records, step, rank, ts, None if ts is None else origin, attempt)
        self._records += 1

    def scalar(self, name: str, value: float, unit: str | None = None, labels: str | None = None) -> None:
        """Add a number to the record."""
        self._add("scalars", (name, value, unit, labels))

    def event(self, type: str, severity: str, message: str, details: str | None = None) -> None:  # noqa: A002 - column
        """Add an event to the record; `details` is JSON."""
        self._add("events", (type, severity, message, details))

    def take(self) -> ImportedBlock | None:
        """Return what has been collected and start anew; None when it is nothing."""
        if not self._records:
            return None
        tables = {dataset: _table(dataset, columns) for dataset, columns in self._columns.items() if columns[0]}
        block = ImportedBlock(records=self._records, tables=tables, source=self._source)
        self._begin()
        return block

    def _begin(self) -> None:
        self._records = 0
        self._rows = 0
        self._columns: dict[str, tuple[list[Any], ...]] = {
            dataset: tuple([] for _ in range(1 + len(_COMMON) + len(own))) for dataset, own in _OWN.items()
        }

    def _add(self, dataset: str, own: tuple[Any, ...]) -> None:
        self._rows += 1
        for column, value in zip(self._columns[dataset], self._common + own, strict=True):
            column.append(value)


def _table(dataset: str, columns: tuple[list[Any], ...]) -> pa.Table:
    schema = table_schema(dataset)
    names = (*_COMMON, *_OWN[dataset])
    arrays = [_array(values, schema.field(name).type) for name, values in zip(names, columns[1:], strict=True)]
    return pa.table([pa.array(columns[0], pa.int32()), *arrays], names=[RECORD_COLUMN, *names])


def _array(values: list[Any], arrow_type: pa.DataType) -> pa.Array:
    if pa.types.is_string(arrow_type):
        return pa.array(values, pa.string()).dictionary_encode()
    return pa.array(values, arrow_type)
