"""The datasets of the store, and those of rollups, which replace rows that are older than the retention period.

The contract defines the fields of rows that ranks send. A rollup row summarises all rows of one series in one bucket of
steps. Rows that arrive late may cause a second rollup row for the same bucket. The values of all columns can be merged,
and the views of the store merge them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rankscope_contract.model.kinds import BASELINE_OPS, OPS
from rankscope_contract.model.schema import (
    COLLECTIVE_FIELDS,
    EVENT_FIELDS,
    FEATURE_FIELDS,
    HASH_FIELDS,
    HISTOGRAM_FIELDS,
    MICRO_STEP,
    MODULE_FIELDS,
    SCALAR_FIELDS,
    STEP,
    TENSOR_FIELDS,
    VPP_STAGE,
    Field,
    ListOf,
    ScalarName,
    required,
)

COMMON_FIELDS: Final = (
    required("run", "string", "Name of the run."),
    Field("attempt", "int32", "Number of the launch (attempt) within the run: 0, 1, …"),
    Field("rank", "int32", "Global rank; null if the row concerns the whole run."),
    Field("incarnation", "string", "Id of the exporter process; null if no rank sent the row."),
    Field("seq", "int64", "Record number within an incarnation: 0, 1, … A gap is lost data."),
    Field("ordinal", "int64", "Number by which the rows of a run sort in the order of their arrival."),
    STEP,
    MICRO_STEP,
    VPP_STAGE,
    Field("ts", "timestamp", "Time of the measurement, UTC, microseconds."),
    Field("ts_origin", "string", "Clock of `ts`: rank, log, file, ingest, exporter or prometheus."),
)

RUN_FIELDS: Final = (
    required("state", "string", "State of the run: see RunState."),
    Field("started_at", "timestamp"),
    Field("ended_at", "timestamp"),
    Field("planned_steps", "int64"),
    Field("last_step", "int64"),
    Field("world_size", "int32", unit="ranks"),
    Field("source_kind", "string", "Origin of the run: live, or the name of the importer."),
    Field("config", "string", "Configuration of the training as JSON; secrets are masked."),
    Field("reason", "string", "Reason of the end of the run, as text."),
)


def dataset_fields(*fields: Field) -> tuple[Field, ...]:
    """Return the fields of a dataset: the fields in COMMON_FIELDS, which all datasets have, then `fields`."""
    # A field in `fields` replaces the field in COMMON_FIELDS with the same name.
    own = {field.name for field in fields}
    return (*(field for field in COMMON_FIELDS if field.name not in own), *fields)


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
    "tensor_stats": dataset_fields(
        *TENSOR_FIELDS,
        *(
            Field(op.name, op.dtype, op.doc, unit="elements" if op.dtype == "int64" else None)
            for op in sorted(OPS.values(), key=lambda op: op.dtype == "int64")
        ),
        *(Field(name, "float32", "Baseline with which the rules compared the statistic.") for name in BASELINE_OPS),
    ),
    "features": dataset_fields(*FEATURE_FIELDS),
    "histograms": dataset_fields(*HISTOGRAM_FIELDS),
    "hashes": dataset_fields(*HASH_FIELDS),
    "collectives": dataset_fields(*COLLECTIVE_FIELDS),
    "modules": dataset_fields(*MODULE_FIELDS),
    "scalars": dataset_fields(
        *SCALAR_FIELDS,
        Field(
            "position",
            "int64",
            "Place of the row on the axis of its run: the step, unless a log has none or restarts it.",
        ),
    ),
    "events": dataset_fields(*EVENT_FIELDS),
    "samples": dataset_fields(
        required("target", "string"),
        required("metric", "string"),
        Field("labels", "string", "Labels of the sample as canonical JSON object."),
        Field(
            "value", "float64", "Value of the sample; null at a staleness marker, the mark that the series has ended."
        ),
    ),
    "runs": dataset_fields(
        *RUN_FIELDS,
        Field("tags", "string", "Tags that users set, as JSON object; null in row versions that do not change them."),
        Field("note", "string", "Text about the run, written by users; null in row versions that do not change it."),
    ),
    "attempts": dataset_fields(
        *RUN_FIELDS, Field("launch_id", "string", "Id of the launch, which is equal on all its ranks.")
    ),
    "tensors": dataset_fields(
        required("kind", "string"),
        required("tensor", "string"),
        Field("index", "int32", "Number of the tuple slot; null for the whole tensor."),
        Field("shape", ListOf("int64"), "Shape of the tensor on the rank; null if it differs between steps."),
        Field("dtype", "string"),
        Field("numel", "int64", unit="elements"),
        Field("module", "string"),
        Field("aliases", ListOf("string"), "Other names of tensors with the same storage (tied weights)."),
    ),
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

DIMENSIONS: Final = ("runs", "attempts", "tensors")
"""Datasets that contain one row per version of an object. Rows are only appended; a view shows the latest version."""

IMPORTED_FROM: Final = "imported_from"
"""Label of scalars that were imported from a log into a run whose ranks reported to a service.

The label contains the last two parts of the log's path. Scalars without it are those of the ranks."""

IMPORT_PREFIX: Final = "import-"
"""Beginning of the incarnation of all rows that were imported from a log. A log is not a process."""
