"""Arrow schemas of the tables that are written to the store, and small tables of rows that the service creates."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from rankscope_contract.model import redaction
from rankscope_contract.model.schema import arrow_schema, canonical_labels
from rankscope_storage.base.datasets import DATASETS

FROM_RANK: Final = "rank"
FROM_INGEST: Final = "ingest"
NO_RUN: Final = ""
"""Value of the column `run` of samples from an exporter of another program.

Such an exporter measures a machine, not a run.
"""
TIME: Final = pa.timestamp("us", "UTC")


@functools.cache
def table_schema(dataset: str) -> pa.Schema:
    """Return the Arrow schema of `dataset`, with all its columns in the order of the dataset's definition."""
    return arrow_schema(pa, DATASETS[dataset])


@functools.cache
def coded_schema(dataset: str) -> pa.Schema:
    """Return the schema of `dataset` with each text column dictionary-encoded."""
    coded = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [field.with_type(coded) if pa.types.is_string(field.type) else field for field in table_schema(dataset)]
    )


@functools.cache
def samples_schema() -> pa.Schema:
    """Return the Arrow schema of scraped samples, with each text column dictionary-encoded.

    It has those columns of the dataset `samples` that a scrape fills.
    """
    names = ("run", "ts", "ts_origin", "target", "metric", "labels", "value")
    return pa.schema([coded_schema("samples").field(name) for name in names])


def rows_table(dataset: str, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return `rows` as an Arrow table of `dataset`.

    A column that is missing in a row is null. A column that the dataset does not have raises KeyError.
    """
    listed = list(rows)
    schema = table_schema(dataset)
    for row in listed:
        if unknown := row.keys() - set(schema.names):
            raise KeyError(f"{dataset} has no column {sorted(unknown)}")
    return pa.Table.from_pylist(listed, schema=schema)


def _labels(text: str) -> str | None:
    try:
        return canonical_labels(json.loads(text)) or (None if text == "{}" else text)
    except (ValueError, TypeError, AttributeError, RecursionError):  # not the labels of any release
        return redaction.redacted_name(text, redaction.MAX_LABEL)


_CLEAN: Final[Mapping[str, Callable[[str], str | None]]] = {
    **dict.fromkeys(("kind", "tensor", "module", "rule", "unit", "type", "severity"), redaction.short_name),
    **dict.fromkeys(("name", "op"), redaction.redacted_name),  # the op of an anomaly may be the name of a scalar
    "labels": _labels,
    "message": redaction.redacted_text,
    "details": redaction.redacted_json,
}


def cleaned(column: pa.Array, name: str) -> pa.Array:
    """Return the text column `name` with secrets masked and long texts cut.

    The text is dictionary-encoded in the result if it is in `column`. Most columns need no change and are returned.
    """
    clean = _CLEAN.get(name) or functools.partial(redaction.short_name, limit=redaction.MAX_DOCUMENT)
    is_coded = pa.types.is_dictionary(column.type)
    coded = column if is_coded else column.dictionary_encode()
    texts = coded.dictionary.to_pylist()
    clean_texts = [None if text is None else clean(text) for text in texts]
    if clean_texts == texts:
        return column
    coded = pa.DictionaryArray.from_arrays(coded.indices, pa.array(clean_texts, pa.string()))
    return coded if is_coded else coded.dictionary_decode()


def constant(text: str | None, count: int) -> pa.DictionaryArray:
    """Return a dictionary-encoded column of `count` rows, all with the value `text`."""
    if text is None:  # null in the indices: Arrow cannot concatenate dictionaries that contain a null
        return pa.nulls(count, pa.dictionary(pa.int32(), pa.string()))
    return pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), pa.array([text], pa.string()))
