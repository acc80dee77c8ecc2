"""Which rows of a batch are new, by the watermarks of their incarnations. Pure: tables in, tables out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.protocol.channel import NOTHING
from rankscope_storage.base.errors import BatchError


def incarnations(tables: Mapping[str, pa.Table]) -> set[str]:
    """Return the incarnations that the rows of `tables` belong to, all of them and seldom more."""
    return {name for table in tables.values() for name in _distinct(table.column("incarnation"))}


def _distinct(column: pa.ChunkedArray) -> list[str]:
    if pa.types.is_dictionary(column.type):
        # It may name some that no row is of any more: their watermarks are asked for in vain.
        return [value for chunk in column.chunks for value in chunk.dictionary.to_pylist() if value is not None]
    if column.null_count == len(column):  # rows of exporters, by the hundred thousand
        return []
    return [value for value in column.unique().to_pylist() if value is not None]


def newer(table: pa.Table, stored: Mapping[str, int]) -> pa.Table:
    """Return the rows above the watermark of their incarnation; rows without incarnation or seq always pass."""
    if not table.num_rows or all(seq == NOTHING for seq in stored.values()):
        return table
    lowest = pc.min(table.column("seq")).as_py()
    if lowest is None or lowest > max(stored.values()):
        return table
    old = _numbered(table, stored, pc.less_equal)
    return table.filter(pc.invert(old)) if pc.any(old).as_py() else table


def check_covered(table: pa.Table, dataset: str, watermarks: Mapping[str, int]) -> None:
    """Raise BatchError for rows above the batch's own watermark: sent again, they would be stored twice."""
    highest = pc.max(table.column("seq")).as_py()
    if highest is None or _is_below_all(highest, table.column("incarnation"), watermarks):
        return
    beyond = pc.sum(_numbered(table, watermarks, pc.greater)).as_py()
    if beyond:
        raise BatchError(
            f"{dataset} has {beyond} rows with a seq above the batch's watermark of their incarnation "
            f"({dict(watermarks)}): the watermark is the last seq that the batch contains"
        )


def _is_below_all(highest: int, of: pa.ChunkedArray, watermarks: Mapping[str, int]) -> bool:
    """Return whether no row can be beyond its watermark, whose ever it is: then nobody looks at them one by one."""
    if not watermarks or highest > min(watermarks.values()) or not pa.types.is_dictionary(of.type):
        return False
    return watermarks.keys() >= set(_distinct(of))


def _numbered(table: pa.Table, limits: Mapping[str, int], compare: Callable[[Any, Any], Any]) -> pa.BooleanArray:
    """Return where `compare(seq, limit of its incarnation)` holds; False where one of the two is null."""
    column = table.column("incarnation")
    if column.null_count == len(column):
        return pa.array(np.zeros(len(column), np.bool_))
    encoded = column.combine_chunks()
    encoded = encoded if pa.types.is_dictionary(encoded.type) else encoded.dictionary_encode()
    by_code = np.array([limits.get(text, NOTHING) for text in encoded.dictionary.to_pylist()] or [NOTHING], np.int64)
    codes = pc.fill_null(encoded.indices, 0).to_numpy(zero_copy_only=False)
    holds = pc.and_kleene(compare(table.column("seq"), pa.array(by_code[codes])), encoded.is_valid())
    return pc.fill_null(holds, fill_value=False)
