"""The datasets of the store, with those of rollups, which replace rows that are older than the retention period.

A rollup row summarises all rows of one series in one bucket of steps. Rows that arrive late may cause a second rollup
row for the same bucket. The values of all columns can be merged, and the views of the store merge them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rankscope_contract.model import schema
from rankscope_contract.model.kinds import OPS
from rankscope_contract.model.schema import SCALAR_FIELDS, TENSOR_FIELDS, Field, ScalarName, dataset_fields

BUCKET_STEPS: Final = 100
"""Number of steps in one bucket of a rollup dataset: 0 to 99, 100 to 199, …"""

BUCKET_SECONDS: Final = 600
"""Number of seconds in one bucket of a rollup dataset, for rows without a step."""

ROLLUPS: Final = {"tensor_stats": "tensor_rollups", "scalars": "scalar_rollups"}
"""Name of the rollup dataset of each dataset that is rolled up."""

_SPAN: Final = (
    Field("step", "int64", "First step of the bucket, a multiple of 100. Rows without a step have 10-minute buckets."),
    Field("first_step", "int64", "Lowest step of the summarised rows."),
    Field("last_step", "int64", "Highest step of the summarised rows."),
    Field("first_ts", "timestamp", "Time of the earliest summarised row."),
    Field("ts", "timestamp", "Time of the latest summarised row."),
    Field("rows", "int64", "Number of rows that this row summarises."),
)


def _summary(name: str, type: ScalarName) -> Iterator[Field]:  # noqa: A002 - field word
    """Yield the rollup columns that summarise one numeric column.

    The columns are minimum, maximum and mean of the finite values, and the numbers of rows with a finite value, a NaN
    and an infinite value. A row with a null is in none of the three numbers.
    """
    yield Field(f"{name}_min", type, "Lowest finite value.")
    yield Field(f"{name}_max", type, "Highest finite value.")
    yield Field(f"{name}_avg", "float64", "Mean of the finite values.")
    yield Field(f"{name}_count", "int64", "Number of finite values.")
    yield Field(f"{name}_nans", "int64", "Number of NaN values.")
    yield Field(f"{name}_infs", "int64", "Number of infinite values.")


def _total(name: str) -> Iterator[Field]:
    yield Field(name, "int64", "Sum of the counts in the summarised rows.", unit="elements")
    yield Field(f"{name}_rows", "int64", "Number of summarised rows in which the count is not null.")


_NONFINITE: Final = (
    Field("nonfinite_rows", "int64", "Number of rows with a non-finite statistic or non-finite elements."),
    Field("first_nonfinite_step", "int64", "Lowest step of rows with a non-finite statistic or non-finite elements."),
)

DATASETS: Final[dict[str, tuple[Field, ...]]] = {
    **schema.DATASETS,
    "tensor_rollups": dataset_fields(
        *TENSOR_FIELDS,
        *_SPAN,
        *(field for op in OPS.values() if op.rollup == "summary" for field in _summary(op.name, "float32")),
        *(field for op in OPS.values() if op.rollup == "total" for field in _total(op.name)),
        *_NONFINITE,
    ),
    "scalar_rollups": dataset_fields(
        *(field for field in SCALAR_FIELDS if field.name != "value"), *_SPAN, *_summary("value", "float64"), *_NONFINITE
    ),
}
"""Columns of each dataset, in the order of the columns in the table."""

TENSOR_ROW_KEY: Final = ("incarnation", "seq", "vpp_stage", "kind", "tensor", "index", "micro_step", "call_seq")
"""Columns that together identify a row of `tensor_stats`."""
