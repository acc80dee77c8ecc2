"""The pages of a column in a Parquet file, which pyarrow does not list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def page_rows(path: Path, group: int, column: str) -> list[int]:
    """Return the number of values of each data page of the column `column` in the row group number `group`."""
    file = pq.ParquetFile(path)
    chunk = file.metadata.row_group(group).column(file.schema_arrow.get_field_index(column))
    return list(_page_rows(path.read_bytes(), chunk.data_page_offset, chunk.num_values))


def _page_rows(content: bytes, offset: int, values: int) -> Iterator[int]:
    while values:
        header, offset = _struct(content, offset)
        offset += header[3]  # compressed_page_size
        rows = header[5][1]  # data_page_header.num_values
        yield rows
        values -= rows


def _struct(content: bytes, at: int) -> tuple[dict[int, Any], int]:
    """Return the fields by number of the Thrift structure at `at`, in the compact protocol, and its end."""
    fields: dict[int, Any] = {}
    number = 0
    while kind := content[at]:
        number, at = number + (kind >> 4), at + 1  # Parquet has no structure with a gap of more than 15 numbers
        fields[number], at = _value(content, at, kind & 15)
    return fields, at + 1


def _value(content: bytes, at: int, kind: int) -> tuple[Any, int]:
    match kind:
        case 1 | 2:
            return kind == 1, at
        case 4 | 5 | 6:
            number, at = _varint(content, at)
            return (number >> 1) ^ -(number & 1), at
        case 8:
            size, at = _varint(content, at)
            return content[at : at + size], at + size
        case 12:
            return _struct(content, at)
        case _:
            raise ValueError(f"a page header has no field of the type {kind}")


def _varint(content: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = content[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
