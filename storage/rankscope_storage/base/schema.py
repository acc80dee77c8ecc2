"""Arrow schemas of the datasets and of the Delta table, fingerprints of file schemas, and names of DuckDB types."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract import SCHEMA_VERSION
from rankscope_contract.model.schema import arrow_schema
from rankscope_storage.base.datasets import DATASETS
from rankscope_storage.base.errors import BatchError

STORE_VERSION: Final = 2
"""Schema version of the store, apart from that of the records of ranks.

From version 2 on, times are without the jumps of the clocks of ranks, and scalars have positions."""
VERSION_KEY: Final = "rankscope_schema"
DATASET_KEY: Final = "rankscope_dataset"
_LARGE_DICTIONARY: Final = 1000
"""Smallest mean number of texts per dictionary for which dictionaries are concatenated without comparing texts.

A column has one dictionary per chunk. For dictionaries of this size, comparing their texts costs more than storing
twice the texts that several dictionaries contain."""
PARTITION_COLUMNS: Final = ("dataset", "part")
UNWRITTEN: Final[Mapping[str, tuple[str, ...]]] = {
    "samples": ("attempt", "rank", "incarnation", "seq", "ordinal", "step", "micro_step", "vpp_stage"),
    "scalars": ("position",),
}
"""Columns, by dataset, that are null in all rows of most files.

A file contains such a column only if one of its rows has a value in it. Writing one null column costs 6 ns per row.
Writing all eight null columns is a fifteenth of the total cost of writing a row of `samples`. Delta readers, and the
views of this package, read a column that is absent from a file as null. A null `position` of a scalar is its step."""


@functools.cache
def dataset_schema(name: str) -> pa.Schema:
    """Return the Arrow schema of dataset `name`: all columns in the order that `rankscope_contract` defines.

    Its metadata (dataset and schema version) is stored in each file. Raises BatchError for an unknown name.
    """
    if name not in DATASETS:
        raise BatchError(f"unknown dataset {name!r}: the datasets are {', '.join(DATASETS)}")
    return arrow_schema(pa, DATASETS[name], {VERSION_KEY: str(SCHEMA_VERSION), DATASET_KEY: name})


@functools.cache
def fingerprint(name: str, *, whole: bool = False) -> str:
    """Return eight hex digits that identify the column names and types of a file of dataset `name`.

    By default, the result is for a file without the UNWRITTEN columns, which are null in most files. With `whole`, it
    is for a file with them. The name of every data file starts with these digits, and the Delta log lists the file
    names. A reader therefore need not open the files to find whether all files have the same columns.
    """
    unwritten = () if whole else UNWRITTEN.get(name, ())
    columns = [f"{field.name}:{field.type}" for field in dataset_schema(name) if field.name not in unwritten]
    return f"{zlib.crc32(';'.join(columns).encode()):08x}"


def written(table: pa.Table, name: str) -> pa.Table:
    """Return `table`, which has rows of dataset `name`, without the UNWRITTEN columns if these are null in all rows.

    UNWRITTEN names the columns of a dataset that are null in most files. If any of them has a value, all remain.
    """
    unwritten = UNWRITTEN.get(name, ())
    if name == "scalars":
        table = _with_positions(table)
    is_usual = all(table.column(column).null_count == table.num_rows for column in unwritten)
    return table.drop_columns(list(unwritten)) if unwritten and is_usual else table


def _with_positions(scalars: pa.Table) -> pa.Table:
    """Return `scalars` with the position of each row, or with null positions if all are equal to the steps."""
    step, position = scalars.column("step"), scalars.column("position")
    if position.null_count == len(position):
        return scalars
    position = pc.coalesce(position, step)
    if position.equals(step):
        position = pa.nulls(len(step), pa.int64())
    return scalars.set_column(scalars.schema.get_field_index("position"), "position", position)


@functools.cache
def table_schema() -> pa.Schema:
    """Return the schema of the Delta table: the partition columns, then the columns of all datasets. All are nullable.

    If two datasets have different types for a column (`value` is float32 in features and float64 in others), the table
    has the wider type. A file has the type of its dataset, and readers convert its values to the wider type.
    """
    partition = pa.schema([(name, pa.string()) for name in PARTITION_COLUMNS])
    merged = pa.unify_schemas([partition, *map(dataset_schema, DATASETS)], promote_options="permissive")
    return pa.schema([pa.field(field.name, field.type) for field in merged])


def conform(table: pa.Table, name: str) -> pa.Table:
    """Return `table` with exactly the columns of dataset `name`, in the order of its schema, each in one chunk.

    An absent nullable column is added as null. Text may be dictionary-encoded and keeps that encoding. Raises
    BatchError for unknown columns, values that do not fit their type, and nulls in required columns.
    """
    schema, given = dataset_schema(name), set(table.column_names)
    if unknown := sorted(given - set(schema.names)):
        raise BatchError(f"{name} has no column {', '.join(unknown)}: its columns are {', '.join(schema.names)}")
    columns = {}
    try:
        for field in schema:
            column = table.column(field.name) if field.name in given else pa.nulls(table.num_rows, field.type)
            if column.type != field.type or (field.name in given and column.num_chunks != 1):
                column = _cast(_one_chunk(column), field, name)
            if not field.nullable and column.null_count:
                raise BatchError(f"{name}.{field.name} is null in {column.null_count} rows: it must have a value")
            columns[field.name] = column
    except pa.ArrowMemoryError:  # unrelated to the content of the rows
        raise
    except pa.ArrowException as error:
        raise BatchError(f"rows of {name} cannot be converted to the schema of the store: {error}") from error
    return pa.table(columns)


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        try:
            column = _unified(column)
        except pa.ArrowException:  # Arrow does not unify dictionaries that contain null themselves
            column = column.cast(column.type.value_type)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _unified(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a dictionary-encoded `column` with one dictionary for all chunks.

    All chunks from one exporter refer to the same dictionary in memory, which has tens of thousands of texts. Such
    identical dictionaries are not compared. Different dictionaries are concatenated if they are large, so that the
    result may contain a text twice.
    """
    if column.num_chunks == 1:
        return column.unify_dictionaries()
    keys = [_memory_of(chunk.dictionary) for chunk in column.chunks]
    shared = {key: chunk.dictionary for key, chunk in zip(keys, column.chunks, strict=True)}
    sizes = list(map(len, shared.values()))
    if len(shared) == len(column.chunks) or sum(sizes) < _LARGE_DICTIONARY * len(shared):
        return column.unify_dictionaries()
    starts = dict(zip(shared, np.cumsum([0, *sizes]).tolist(), strict=False))
    joined = pa.concat_arrays(shared.values())
    codes = (
        pc.add(chunk.indices, pa.scalar(starts[key], pa.int32()))
        for key, chunk in zip(keys, column.chunks, strict=True)
    )
    return pa.chunked_array([pa.DictionaryArray.from_arrays(code, joined) for code in codes])


def _memory_of(array: pa.Array) -> tuple[int, ...]:
    """Return the addresses, the offset and the length of the memory of `array`.

    Arrays with the same result have the same values.
    """
    return (*(0 if one is None else one.address for one in array.buffers()), array.offset, len(array))


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
    """Return the schema version in the metadata of a file; 0 for a file that Rankscope did not write."""
    return int((metadata or {}).get(VERSION_KEY.encode(), b"0"))


_NAMES: Final = {
    pa.string(): "VARCHAR",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.bool_(): "BOOLEAN",
}


@functools.cache
def sql_type(type_: pa.DataType) -> str:
    """Return the name of the DuckDB type for an Arrow type that a column of a dataset has."""
    if pa.types.is_list(type_):
        return f"{sql_type(type_.value_type)}[]"
    if pa.types.is_timestamp(type_):
        return "TIMESTAMPTZ"
    return _NAMES[type_]


@functools.cache
def sql_nulls(dataset: str) -> dict[str, str]:
    """Return by column the SELECT expression for a column of `dataset` that is null in all rows."""
    return {field.name: f'NULL::{sql_type(field.type)} AS "{field.name}"' for field in dataset_schema(dataset)}
