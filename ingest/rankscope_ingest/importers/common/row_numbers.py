"""Numbers imported records, and gives their rows the columns that all rows have."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_ingest.base.tables import constant, rows_table, table_schema
from rankscope_ingest.importers.common.importer import RECORD_COLUMN, ImportedBlock, ImportedRecord

_CODED = pa.dictionary(pa.int32(), pa.string())


class Stamp:
    """Numbers the records of one source, which is one incarnation of the store."""

    def __init__(self, *, run: str, incarnation: str) -> None:
        self.run = run
        self.incarnation = incarnation
        self.records = 0

    def rows(self, records: Sequence[ImportedRecord]) -> dict[str, pa.Table]:
        """Return the rows of `records` by dataset, and count them."""
        rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        arrived = time.time_ns() // 1000
        for seq, record in enumerate(records, self.records):
            common = {
                "run": self.run,
                "attempt": record.attempt,
                "rank": record.rank,
                "incarnation": self.incarnation,
                "seq": seq,
                "ordinal": arrived + seq,
                "step": record.step,
                "micro_step": record.micro_step,
                "ts": record.ts,
                "ts_origin": None if record.ts is None else record.ts_origin,
            }
            for dataset, own in record.rows.items():
                rows[dataset] += [{**common, **row} for row in own]
        self.records += len(records)
        return {dataset: rows_table(dataset, listed) for dataset, listed in rows.items() if listed}

    def block(self, block: ImportedBlock) -> dict[str, pa.Table]:
        """Return the tables of `block` with all columns, and count its records."""
        arrived = time.time_ns() // 1000
        tables = {
            dataset: self._full(dataset, table, arrived) for dataset, table in block.tables.items() if table.num_rows
        }
        self.records += block.records
        return tables

    def _full(self, dataset: str, table: pa.Table, arrived: int) -> pa.Table:
        seq = pc.add(pc.cast(table.column(RECORD_COLUMN), pa.int64()), self.records)
        given = {name: table.column(name) for name in table.column_names if name != RECORD_COLUMN}
        given |= {
            "run": constant(self.run, table.num_rows),
            "incarnation": constant(self.incarnation, table.num_rows),
            "seq": seq,
            "ordinal": pc.add(seq, arrived),
            "attempt": _attempts(given, table.num_rows),
        }
        return _arranged(dataset, given, table.num_rows)


def _attempts(given: Mapping[str, Any], rows: int) -> Any:
    if "attempt" not in given:
        return pa.array(np.zeros(rows, np.int32))
    return pc.fill_null(given["attempt"], 0)


def _arranged(dataset: str, given: Mapping[str, Any], rows: int) -> pa.Table:
    """Return `given` as a table of `dataset`: its columns in order, nulls for the rest; text may stay coded."""
    schema = table_schema(dataset)
    if unknown := given.keys() - set(schema.names):
        raise KeyError(f"{dataset} has no column {sorted(unknown)}")
    columns, fields = [], []
    for field in schema:
        column = given.get(field.name)
        if column is None:
            column = pa.nulls(rows, _CODED if pa.types.is_string(field.type) else field.type)
        elif not pa.types.is_dictionary(column.type):
            column = pc.cast(column, field.type)
        columns.append(column)
        fields.append(field.with_type(column.type))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))
