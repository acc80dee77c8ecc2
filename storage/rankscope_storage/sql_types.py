"""What DuckDB calls the types of the contract."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

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
