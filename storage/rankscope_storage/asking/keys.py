"""Which columns tell the series of a tensor apart, file by file, and remembered: the others need not be compared.

Where nobody trains in several stages or micro-batches, four of the keys are null in all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.escaping import sql_identifier
from rankscope_storage.asking.by_file import Ask, ByFile
from rankscope_storage.macros.deviations import OPTIONAL_KEYS

_BY_FILE: Final = ByFile(
    "tensor_stats",
    ", ".join(f"count({sql_identifier(name)}) > 0 AS {sql_identifier(name)}" for name in OPTIONAL_KEYS),
    where="true",
    schema=pa.schema({name: pa.bool_() for name in OPTIONAL_KEYS}),
)


def absent_keys(files: Sequence[str], ask: Ask) -> tuple[str, ...]:
    """Return the optional keys that are null in all rows of tensor statistics in `files`; `ask` runs SQL."""
    told = _BY_FILE.of(files, ask)
    return tuple(name for name in OPTIONAL_KEYS if not pc.any(told.column(name), min_count=0).as_py())
