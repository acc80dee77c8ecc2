"""Convert imported records to rows of the store, with their sequence numbers and their common columns."""

from __future__ import annotations

import time
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_ingest.base.tables import cleaned, constant, table_schema
from rankscope_ingest.importers.common.importer import RECORD_COLUMN, ImportedBlock
from rankscope_ingest.importers.common.positions import Positions

_CODED: Final = pa.dictionary(pa.int32(), pa.string())


class Numbering:
    """Numbers the records of one source, and adds to their rows the columns that are equal in all rows.

    A source is a log file, or a file or a rank of a log folder. Each source is one incarnation in the store.
    """

    def __init__(self, *, run: str, incarnation: str, positions: Positions | None = None) -> None:
        self.run = run
        self.incarnation = incarnation
        self.records = 0
        self.positions = positions or Positions()

    def block(self, block: ImportedBlock) -> dict[str, pa.Table]:
        """Return the tables of `block` with all columns of their datasets.

        Each record gets the next sequence number of the source. The next call continues after the sequence number of
        the last record of this call.
        """
        arrived = time.time_ns() // 1000
        tables = {
            name: _clean(self._full(name, table, arrived)) for name, table in block.tables.items() if table.num_rows
        }
        self.records += block.records
        if "scalars" in tables:
            tables["scalars"] = self.positions.placed(tables["scalars"])
        return tables

    def _full(self, dataset: str, table: pa.Table, arrived: int) -> pa.Table:
        """Return `table` with all columns of `dataset`; columns that the table lacks are null.

        Text columns may be dictionary-encoded.
        """
        count = table.num_rows
        seq = pc.add(pc.cast(table.column(RECORD_COLUMN), pa.int64()), self.records)
        given = {name: table.column(name) for name in table.column_names if name != RECORD_COLUMN}
        given |= {
            "run": constant(self.run, count),
            "incarnation": constant(self.incarnation, count),
            "seq": seq,
            "ordinal": pc.add(seq, arrived),
            "attempt": pc.fill_null(given["attempt"], 0) if "attempt" in given else pa.array(np.zeros(count, np.int32)),
        }
        schema = table_schema(dataset)
        if unknown := given.keys() - set(schema.names):
            raise KeyError(f"dataset {dataset} has no columns {sorted(unknown)}, which the importer returned")
        columns, fields = [], []
        for field in schema:
            column = given.get(field.name)
            if column is None:
                column = pa.nulls(count, _CODED if pa.types.is_string(field.type) else field.type)
            elif not pa.types.is_dictionary(column.type):
                column = pc.cast(column, field.type)
            columns.append(column)
            fields.append(field.with_type(column.type))
        return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _clean(table: pa.Table) -> pa.Table:
    """Return `table` with secrets masked in its texts, and long texts cut."""
    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_dictionary(field.type):
            table = table.set_column(place, field, cleaned(table.column(place).combine_chunks(), field.name))
    return table
