"""Small tables of rows the service makes itself: runs, attempts, tensors, gaps, incidents."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Final

import pyarrow as pa

from rankscope_contract.fields import arrow_schema
from rankscope_contract.records import DATASETS

FROM_RANK: Final = "rank"
FROM_INGEST: Final = "ingest"


@functools.cache
def table_schema(dataset: str) -> pa.Schema:
    """Return the Arrow schema of `dataset`, all columns in the order of the table."""
    return arrow_schema(pa, DATASETS[dataset])


@functools.cache
def coded_schema(dataset: str) -> pa.Schema:
    """Return the schema of `dataset` with every text column as codes into a dictionary."""
    coded = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [field.with_type(coded) if pa.types.is_string(field.type) else field for field in table_schema(dataset)]
    )


def rows_table(dataset: str, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return `rows` as a table of `dataset`; a column a row does not name is null, an unknown one is a mistake."""
    listed = list(rows)
    schema = table_schema(dataset)
    for row in listed:
        if unknown := row.keys() - set(schema.names):
            raise KeyError(f"{dataset} has no column {sorted(unknown)}")
    return pa.Table.from_pylist(listed, schema=schema)
