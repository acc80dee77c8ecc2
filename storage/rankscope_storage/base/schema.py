"""Arrow schemas of the datasets and of the Delta table, fingerprints of file shapes, and DuckDB's names of types."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract import SCHEMA_VERSION
from rankscope_contract.model.fields import arrow_schema
from rankscope_contract.model.schema import DATASETS
from rankscope_contract.security.escaping import sql_identifier
from rankscope_storage.base.errors import BatchError

VERSION_KEY: Final = "rankscope_schema"
DATASET_KEY: Final = "rankscope_dataset"
_LARGE_DICTIONARY: Final = 1000
"""Texts from which on comparing them costs more than some that stand there twice."""
_WIDEST_BITS: Final = 64
PARTITION_COLUMNS: Final = ("dataset", "part")
UNWRITTEN: Final[Mapping[str, tuple[str, ...]]] = {
    "samples": ("attempt", "rank", "incarnation", "seq", "ordinal", "step", "micro_step", "vpp_stage")
}
"""Columns that are null in all rows of a dataset as a rule, and are written where they are not.

To write that a column is null takes 6 ns a row, of all that a sample of an exporter costs a fifteenth for these eight.
Readers of Delta tables take a column that a file does not have for null, and so do our views."""


@functools.cache
def dataset_schema(name: str) -> pa.Schema:
    """Return all columns of dataset `name`, in the order of the contract; files carry its metadata in their footer."""
    if name not in DATASETS:
        raise BatchError(f"there is no dataset {name!r}: known are {', '.join(DATASETS)}")
    return arrow_schema(pa, DATASETS[name], {VERSION_KEY: str(SCHEMA_VERSION), DATASET_KEY: name})


def empty_table(name: str) -> pa.Table:
    """Return dataset `name` with no rows."""
    return dataset_schema(name).empty_table()


@functools.cache
def fingerprint(name: str, *, whole: bool = False) -> str:
    """Return eight hex digits that change whenever a column of a usual file of `name` does, or of a `whole` one.

    It stands in every file name, so that a reader knows from the log alone whether all files have one shape.
    """
    unwritten = () if whole else UNWRITTEN.get(name, ())
    text = ";".join(f"{field.name}:{field.type}" for field in dataset_schema(name) if field.name not in unwritten)
    return f"{zlib.crc32(text.encode()):08x}"


def written(table: pa.Table, name: str) -> pa.Table:
    """Return the columns of `table`, rows of dataset `name`, that its file has."""
    unwritten = UNWRITTEN.get(name, ())
    is_usual = all(table.column(column).null_count == table.num_rows for column in unwritten)
    return table.drop_columns(list(unwritten)) if unwritten and is_usual else table


def table_schema() -> pa.Schema:
    """Return the schema of the Delta table: partition columns, then every column of every dataset, all nullable.

    Where datasets disagree on a type (`value` is float32 in features, float64 elsewhere) the wider one stands;
    files keep their own, and readers widen.
    """
    columns: dict[str, pa.DataType] = {name: pa.string() for name in PARTITION_COLUMNS}
    for dataset in DATASETS:
        for field in dataset_schema(dataset):
            columns[field.name] = _wider(columns.get(field.name, field.type), field.type, field.name)
    return pa.schema([pa.field(name, type_) for name, type_ in columns.items()])


def _wider(one: pa.DataType, other: pa.DataType, name: str) -> pa.DataType:
    if one == other:
        return one
    if {one, other} == {pa.float32(), pa.float64()}:
        return pa.float64()
    if {one, other} == {pa.int32(), pa.int64()}:
        return pa.int64()
    raise TypeError(f"column {name} is {one} in one dataset and {other} in another: give one of them another name")


def conform(table: pa.Table, name: str) -> pa.Table:
    """Return `table` with exactly the columns of dataset `name`, in order, in one chunk each.

    Absent nullable columns become null; text may come, and stays, dictionary-encoded. Raises BatchError otherwise.
    """
    schema = dataset_schema(name)
    unknown = sorted(set(table.column_names) - set(schema.names))
    if unknown:
        raise BatchError(f"{name} has no column {', '.join(unknown)}: its columns are {', '.join(schema.names)}")
    absent = _Absent(table.num_rows)
    try:
        columns = {field.name: _conform_column(table, field, name, absent) for field in schema}
    except pa.ArrowMemoryError:  # which says nothing of the rows
        raise
    except pa.ArrowException as error:
        raise BatchError(f"rows of {name} cannot be brought into the form of the store: {error}") from error
    return pa.table(columns)


def _conform_column(table: pa.Table, field: pa.Field, dataset: str, absent: _Absent) -> pa.Array:
    if field.name not in table.column_names:
        column = absent.column(field.type)
    else:
        column = _cast(_one_chunk(table.column(field.name)), field, dataset)
    if not field.nullable and column.null_count:
        raise BatchError(f"{dataset}.{field.name} is null in {column.null_count} rows: it must have a value")
    return column


@dataclass(slots=True)
class _Absent:
    """Columns of so many nulls, over one piece of memory that nobody ever looks at: most datasets have several."""

    rows: int
    _zeros: pa.Buffer | None = None

    def column(self, type_: pa.DataType) -> pa.Array:
        is_text = pa.types.is_string(type_)
        if not is_text and not (pa.types.is_primitive(type_) and type_.bit_width <= _WIDEST_BITS):
            return pa.nulls(self.rows, type_)
        if self._zeros is None:
            self._zeros = pa.py_buffer(np.zeros(self.rows + 1, np.uint64))
        buffers = [self._zeros, self._zeros, *([pa.py_buffer(b"")] if is_text else [])]
        return pa.Array.from_buffers(type_, self.rows, buffers, null_count=self.rows)


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        try:
            column = _unified(column)
        except pa.ArrowException:  # a null in a dictionary itself and not in the codes: Arrow joins no such two
            column = column.cast(column.type.value_type)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _unified(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return `column` with one dictionary for all chunks.

    Each page of an exporter brings the dictionary of the one before it: the same memory, tens of thousands of labels.
    What is known to be the same is not compared, and large dictionaries are put behind one another, so that a text may
    stand in the result twice.
    """
    places: dict[tuple[int, ...], int] = {}
    shared: list[pa.Array] = []
    of_chunk = []
    for chunk in column.chunks:
        texts = chunk.dictionary
        key = (*(0 if buffer is None else buffer.address for buffer in texts.buffers()), texts.offset, len(texts))
        if key not in places:
            places[key] = len(shared)
            shared.append(texts)
        of_chunk.append(places[key])
    if len(shared) == len(column.chunks) or sum(map(len, shared)) < _LARGE_DICTIONARY * len(shared):
        return column.unify_dictionaries()
    starts = np.cumsum([0, *map(len, shared)])
    joined = pa.concat_arrays(shared)
    codes = (
        pc.add(chunk.indices, pa.scalar(int(starts[place]), pa.int32()))
        for place, chunk in zip(of_chunk, column.chunks, strict=True)
    )
    return pa.chunked_array([pa.DictionaryArray.from_arrays(code, joined) for code in codes])


def _cast(column: pa.Array, field: pa.Field, dataset: str) -> pa.Array:
    if column.type == field.type:
        return column
    if pa.types.is_dictionary(column.type):
        if field.type == pa.string() and column.type.value_type == pa.string():
            return column
        column = column.dictionary_decode()
    try:
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise BatchError(f"{dataset}.{field.name} must be {field.type}, not {column.type}: {error}") from error


def schema_version(metadata: Mapping[bytes, bytes] | None) -> int:
    """Return the schema version in a file's metadata; 0 for a file that is not ours."""
    return int((metadata or {}).get(VERSION_KEY.encode(), b"0"))


_NAMES: Final = {
    pa.string(): "VARCHAR",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.bool_(): "BOOLEAN",
}


def sql_type(type_: pa.DataType) -> str:
    """Return the DuckDB name of an Arrow type of the contract."""
    if pa.types.is_list(type_):
        return f"{sql_type(type_.value_type)}[]"
    if pa.types.is_timestamp(type_):
        return "TIMESTAMPTZ"
    return _NAMES[type_]


def sql_null(field: pa.Field) -> str:
    """Return what to select for a column that is null in all rows."""
    return f"NULL::{sql_type(field.type)} AS {sql_identifier(field.name)}"
