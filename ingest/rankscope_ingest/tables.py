"""Small tables of rows the service makes itself (runs, attempts, tensors, gaps, incidents), and columns that grow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
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


class GrowingColumn:
    """A column whose first n values are always the same: built once at the greatest length asked for, then sliced.

    Slicing copies nothing, so that a name stands in memory once for all batches that mention it.
    """

    def __init__(self, build: Callable[[int], pa.Array]) -> None:
        self._build = build
        self._array = build(0)

    def head(self, length: int) -> pa.Array:
        """Return the first `length` values."""
        array = self._array
        if length > len(array):
            # Two threads may both build; each slices its own, and either may stay.
            array = self._array = self._build(length + length // 2)
        return array.slice(0, length)


def constant_column(value: Any, arrow_type: pa.DataType) -> GrowingColumn:
    """Return the column that repeats `value`, which may be None."""
    return tiled_column(pa.array([value], arrow_type))


def tiled_column(values: pa.Array) -> GrowingColumn:
    """Return the column that repeats the whole of `values`, as long as asked for. Text becomes a dictionary.

    Four bytes a row instead of the name itself, and the store sorts by codes instead of by text.
    """
    if pa.types.is_string(values.type):
        encoded = values.dictionary_encode()
        codes = tiled_column(encoded.indices)
        return GrowingColumn(lambda length: pa.DictionaryArray.from_arrays(codes.head(length), encoded.dictionary))

    def build(length: int) -> pa.Array:
        copies = -(-length // len(values)) if len(values) else 0
        return pa.concat_arrays([values] * copies) if copies else values.slice(0, 0)

    return GrowingColumn(build)
