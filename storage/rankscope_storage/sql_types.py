"""What DuckDB calls the types of the contract."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from rankscope_contract.escaping import sql_identifier

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
