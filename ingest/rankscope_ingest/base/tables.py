"""Schemas of tables on their way to the store, and small tables of rows that the service makes itself."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from rankscope_contract.model.fields import arrow_schema
from rankscope_contract.model.schema import DATASETS

FROM_RANK: Final = "rank"
FROM_INGEST: Final = "ingest"
NO_RUN: Final = ""
"""Of samples: an exporter beside the ranks measures a machine, whatever runs there."""
TIME: Final = pa.timestamp("us", "UTC")


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


@functools.cache
def samples_schema() -> pa.Schema:
    """Return the columns that a sample of an exporter has, coded."""
    names = ("run", "ts", "ts_origin", "target", "metric", "labels", "value")
    return pa.schema([coded_schema("samples").field(name) for name in names])


def rows_table(dataset: str, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return `rows` as a table of `dataset`; a column a row does not name is null, an unknown one is a mistake."""
    listed = list(rows)
    schema = table_schema(dataset)
    for row in listed:
        if unknown := row.keys() - set(schema.names):
            raise KeyError(f"{dataset} has no column {sorted(unknown)}")
    return pa.Table.from_pylist(listed, schema=schema)


def constant(text: str | None, count: int) -> pa.DictionaryArray:
    """Return `text` in all of `count` rows."""
    if text is None:  # in the codes: dictionaries that hold a null cannot be joined
        return pa.nulls(count, pa.dictionary(pa.int32(), pa.string()))
    return pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), pa.array([text], pa.string()))
