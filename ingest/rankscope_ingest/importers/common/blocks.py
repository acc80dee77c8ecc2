"""Collects what importers find, row by row, into columns: a block costs the store a tenth of as many records."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from rankscope_ingest.base.tables import table_schema
from rankscope_ingest.importers.common.importer import RECORD_COLUMN, ImportedBlock

BLOCK_ROWS: Final = 200_000

_OF_RECORD: Final = ("step", "rank", "ts", "ts_origin", "attempt")
_OF_SCALAR: Final = ("name", "unit", "labels")
_OF_EVENT: Final = ("type", "severity", "message", "details")


class BlockBuilder:
    """Scalars and events of the records of one source, in their order."""

    def __init__(self, source: str = "") -> None:
        self._source = source
        self._begin()

    @property
    def is_full(self) -> bool:
        """Whether the block is worth storing."""
        return len(self._values) >= BLOCK_ROWS or len(self._records) >= BLOCK_ROWS

    def record(
        self, *, step: int | None = None, rank: int | None = None, ts: int | None = None, origin: str, attempt: int = 0
    ) -> None:
        """Begin the next record; what is added belongs to it."""
        self._records.append((step, rank, ts, None if ts is None else origin, attempt))

    def scalar(self, name: str, value: float, unit: str | None = None, labels: str | None = None) -> None:
        """Add a number to the record."""
        self._values.append(value)
        self._of_values.append(len(self._records) - 1)
        named = (name, unit, labels)
        # A log has few names for many numbers: each stands here once.
        self._named.append(self._names.setdefault(named, len(self._names)))

    def event(self, type: str, severity: str, message: str, details: str | None = None) -> None:  # noqa: A002 - column
        """Add an event to the record; `details` is JSON."""
        self._events.append((type, severity, message, details))
        self._of_events.append(len(self._records) - 1)

    def take(self) -> ImportedBlock | None:
        """Return what has been collected and start anew; None when it is nothing."""
        if not self._records:
            return None
        tables = {}
        if self._values:
            names = [column.take(pa.array(self._named)) for column in _columns("scalars", _OF_SCALAR, self._names)]
            columns = [pa.array(self._values), *(column.dictionary_encode() for column in names)]
            tables["scalars"] = self._table(self._of_values, ("value", *_OF_SCALAR), columns)
        if self._events:
            columns = _columns("events", _OF_EVENT, self._events)
            tables["events"] = self._table(self._of_events, _OF_EVENT, columns)
        block = ImportedBlock(records=len(self._records), tables=tables, source=self._source)
        self._begin()
        return block

    def _begin(self) -> None:
        self._records: list[tuple[Any, ...]] = []
        self._values = array("d")
        self._of_values = array("i")
        self._named = array("i")
        self._names: dict[tuple[str, str | None, str | None], int] = {}
        self._events: list[tuple[str, str, str, str | None]] = []
        self._of_events = array("i")

    def _table(self, of_rows: array[int], names: Sequence[str], columns: Sequence[Any]) -> pa.Table:
        places = pa.array(of_rows, pa.int32())
        of_records = [column.take(places) for column in _columns("scalars", _OF_RECORD, self._records)]
        return pa.table([places, *of_records, *columns], names=[RECORD_COLUMN, *_OF_RECORD, *names])


def _columns(dataset: str, names: Sequence[str], rows: Any) -> list[pa.Array]:
    schema = table_schema(dataset)
    return [
        pa.array(values, schema.field(name).type) for name, values in zip(names, zip(*rows, strict=True), strict=True)
    ]
