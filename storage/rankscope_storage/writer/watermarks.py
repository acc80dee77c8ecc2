"""Select the new rows of a batch by the watermarks of their incarnations.

An incarnation is one exporter process. Its watermark is the number (seq) of its last stored record. This module does no
I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.protocol.channel import NOTHING
from rankscope_storage.base.errors import BatchError


def incarnations(tables: Mapping[str, pa.Table]) -> set[str]:
    """Return the incarnations of all rows of `tables`. The result may also contain incarnations without rows."""
    return set().union(*(_distinct(table.column("incarnation")) for table in tables.values()))


def _distinct(column: pa.ChunkedArray) -> set[str]:
    if pa.types.is_dictionary(column.type):  # may include incarnations without rows
        values = {value for chunk in column.chunks for value in chunk.dictionary.to_pylist()}
    elif column.null_count == len(column):  # rows of exporters, by the hundred thousand
        return set()
    else:
        values = set(column.unique().to_pylist())
    return values - {None}


def newer(table: pa.Table, stored: Mapping[str, int]) -> pa.Table:
    """Return the rows above the watermark of their incarnation, and all rows without incarnation or seq.

    `stored` has the watermark of each incarnation.
    """
    if not table.num_rows or all(seq == NOTHING for seq in stored.values()):
        return table
    lowest = pc.min(table.column("seq")).as_py()
    if lowest is None or lowest > max(stored.values()):
        return table
    old = _numbered(table, stored, pc.less_equal)
    return table.filter(pc.invert(old)) if pc.any(old).as_py() else table


def check_covered(table: pa.Table, dataset: str, watermarks: Mapping[str, int]) -> None:
    """Raise BatchError if rows have a seq above the watermark that the batch declares for their incarnation.

    Such rows would be stored twice if the batch were sent again.
    """
    highest, owners = pc.max(table.column("seq")).as_py(), table.column("incarnation")
    if highest is None:
        return
    is_below_all = highest <= min(watermarks.values(), default=NOTHING) and pa.types.is_dictionary(owners.type)
    if is_below_all and watermarks.keys() >= _distinct(owners):
        return  # no row can be above its watermark: the rows need not be compared
    beyond = pc.sum(_numbered(table, watermarks, pc.greater)).as_py()
    if beyond:
        raise BatchError(
            f"{dataset} has {beyond} rows with a seq above the batch's watermark of their incarnation "
            f"({dict(watermarks)}): the watermark is the last seq that the batch contains"
        )


def _numbered(table: pa.Table, limits: Mapping[str, int], compare: Callable[[Any, Any], Any]) -> pa.BooleanArray:
    """Return a mask of the rows for which `compare(seq, limit of the incarnation)` is true.

    The mask is False for rows without seq or incarnation.
    """
    column = table.column("incarnation")
    if column.null_count == len(column):
        return pa.array(np.zeros(len(column), np.bool_))
    encoded = column.combine_chunks()
    encoded = encoded if pa.types.is_dictionary(encoded.type) else encoded.dictionary_encode()
    by_code = np.array([limits.get(text, NOTHING) for text in encoded.dictionary.to_pylist()] or [NOTHING], np.int64)
    codes = pc.fill_null(encoded.indices, 0).to_numpy(zero_copy_only=False)
    holds = pc.and_kleene(compare(table.column("seq"), pa.array(by_code[codes])), encoded.is_valid())
    return pc.fill_null(holds, fill_value=False)
