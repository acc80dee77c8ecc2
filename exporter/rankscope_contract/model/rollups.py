"""What stays of rows that became too old to be kept one by one: columns of the rollup datasets, and their buckets.

A rollup row stands for all rows of one series in one bucket of steps. Rows that came late may have one of their own
for the same bucket: every column is such that several can be made one, and the views do so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rankscope_contract.model.fields import Field, ScalarName
from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS

BUCKET_STEPS: Final = 100
"""Steps that share a bucket: 0 to 99, 100 to 199, …"""

BUCKET_SECONDS: Final = 600
"""Rows without a step share a bucket by the clock instead."""

ROLLUPS: Final = {"tensor_stats": "tensor_rollups", "scalars": "scalar_rollups"}
"""Datasets that are rolled up, and into which."""

_SPAN: Final = (
    Field("step", "int64", "First step of the bucket, a multiple of 100; without steps ten minutes are a bucket."),
    Field("first_step", "int64", "The lowest step that has a row."),
    Field("last_step", "int64", "The highest."),
    Field("first_ts", "timestamp", "When the first of the rows was measured."),
    Field("ts", "timestamp", "When the last of them was."),
    Field("rows", "int64", "How many rows this one stands for."),
)


def _summary(name: str, type: ScalarName) -> Iterator[Field]:  # noqa: A002 - field word
    """Yield what is kept of one number: absent are the rows that are in none of the three counts."""
    yield Field(f"{name}_min", type, "The lowest finite one.")
    yield Field(f"{name}_max", type, "The highest finite one.")
    yield Field(f"{name}_avg", "float64", "Mean of the finite ones.")
    yield Field(f"{name}_count", "int64", "How many are finite.")
    yield Field(f"{name}_nans", "int64", "How many are NaN.")
    yield Field(f"{name}_infs", "int64", "How many are infinite.")


def _total(name: str) -> Iterator[Field]:
    yield Field(name, "int64", "Sum over the rows.", unit="elements")
    yield Field(f"{name}_rows", "int64", "Rows that have it.")


_NONFINITE: Final = (
    Field("nonfinite_rows", "int64", "Rows with anything in them that is not finite, elements included."),
    Field("first_nonfinite_step", "int64", "The lowest step of these."),
)

TENSOR_ROLLUP_FIELDS: Final = (
    *_SPAN,
    *(field for op in VALUE_OPS for field in _summary(op, "float32")),
    *(field for op in COUNT_OPS for field in _total(op)),
    *_NONFINITE,
)

SCALAR_ROLLUP_FIELDS: Final = (*_SPAN, *_summary("value", "float64"), *_NONFINITE)
