"""Recognize files of earlier releases with integers that some readers cannot read.

They are split into bytes (tensor statistics), or are differences of any width (all other datasets). The readers are
listed in docs/readers.md.
"""

from __future__ import annotations

from typing import Final

import pyarrow.parquet as pq

from rankscope_storage.files.integer_pages import WIDE

INTEGERS_KEY: Final = "rankscope_integers"
"""Key in the metadata of each file of this release: all readers read its integers. Older files lack the key."""

_INTEGER_TYPES: Final = ("INT32", "INT64")  # physical types of Parquet, of times too


def has_older_integers(metadata: pq.FileMetaData) -> bool:
    """Return whether some readers cannot read the integers of a file, because an earlier release wrote it."""
    if INTEGERS_KEY.encode() in (metadata.metadata or {}):
        return False
    places = [
        place for place in range(metadata.num_columns) if metadata.schema.column(place).physical_type in _INTEGER_TYPES
    ]
    return any(
        _is_older(metadata.row_group(group).column(place))
        for group in range(metadata.num_row_groups)
        for place in places
    )


def _is_older(chunk: pq.ColumnChunkMetaData) -> bool:
    if "BYTE_STREAM_SPLIT" in chunk.encodings:
        return True
    found = chunk.statistics if "DELTA_BINARY_PACKED" in chunk.encodings else None
    return found is not None and found.has_min_max and found.max_raw - found.min_raw >= WIDE
