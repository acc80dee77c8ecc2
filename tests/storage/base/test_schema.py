"""Schemas of the stored datasets. A golden file lists each column, because every reader of history depends on it."""

import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankscope_contract import SCHEMA_VERSION
from rankscope_storage.base.datasets import DATASETS
from rankscope_storage.base.errors import BatchError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import conform, dataset_schema, fingerprint, schema_version, table_schema
from rankscope_storage.files.encoding import has_older_integers, write_file
from rankscope_storage.files.filesystem import STAGING

GOLDEN = Path(__file__).parents[2] / "golden" / "parquet_schema.txt"


def two_values(kind: pa.DataType) -> pa.Array:
    if pa.types.is_list(kind):
        return pa.array([[value] for value in two_values(kind.value_type).to_pylist()], kind)
    if pa.types.is_boolean(kind):
        return pa.array([False, True])
    return pa.array(["x", "y"] if pa.types.is_string(kind) else [0, 1], kind)


def described(root: Path, dataset: str) -> str:
    """Return columns, types and encodings of a file of `dataset`, as Parquet reports them, after some checks."""
    rows = pa.table({field.name: two_values(field.type) for field in dataset_schema(dataset)})  # no constant columns
    file = write_file(root, dataset, "p", conform(rows, dataset), sync_to_disk)
    metadata = pq.ParquetFile(root / file.path).metadata
    assert SCHEMA_VERSION == schema_version(metadata.metadata)
    assert dataset.encode() == metadata.metadata[b"rankscope_dataset"]
    # DuckDB 1.3 to 1.5, fastparquet and pyarrow 14 read BYTE_STREAM_SPLIT only of floats.
    assert not has_older_integers(metadata)
    group = metadata.row_group(0)
    lines = [f"{dataset}  fingerprint {fingerprint(dataset)}"]
    for position in range(metadata.num_columns):
        column, chunk = metadata.schema.column(position), group.column(position)
        encodings = ",".join(sorted(set(chunk.encodings) - {"RLE"}))
        logical = re.sub(r", is_from_converted.*", ")", str(column.logical_type))
        lines.append(f"  {column.path:24} {column.physical_type:10} {logical:56} {encodings}")
    return "\n".join(line.rstrip() for line in lines)


def test_schema_of_every_file_equals_the_golden_file(tmp_path):
    """Readers must still read older files if it changes. RANKSCOPE_UPDATE_GOLDEN=1 rewrites the golden file."""
    (tmp_path / STAGING).mkdir()
    text = "\n\n".join(described(tmp_path, dataset) for dataset in DATASETS) + "\n"
    if os.environ.get("RANKSCOPE_UPDATE_GOLDEN"):
        GOLDEN.write_text(text)

    assert GOLDEN.read_text() == text


def test_file_without_metadata_has_schema_version_0():
    assert 0 == schema_version(None)


def test_delta_table_has_the_columns_of_all_datasets_all_nullable():
    """It has the wider of two types."""
    schema = table_schema()
    names = {name for dataset in DATASETS for name in dataset_schema(dataset).names}

    assert ["dataset", "part"] == schema.names[:2]
    assert {"dataset", "part"} | names == set(schema.names)
    assert all(field.nullable for field in schema)
    of_features = dataset_schema("features").field("value").type
    assert (pa.float32(), pa.float64()) == (of_features, schema.field("value").type)


def test_conform_adds_columns_reorders_and_refuses_values_out_of_range():
    table = conform(pa.table({"value": [1.5], "name": ["loss"], "rank": pa.array([3]), "run": ["r"]}), "scalars")
    (row,) = table.to_pylist()

    assert (dataset_schema("scalars").names, pa.int32()) == (table.column_names, table.schema.field("rank").type)
    assert {"run": "r", "name": "loss", "value": 1.5, "rank": 3} == {k: v for k, v in row.items() if v is not None}
    with pytest.raises(BatchError, match=r"scalars\.rank must be int32"):
        conform(pa.table({"run": ["r"], "name": ["n"], "rank": pa.array([1 << 40], pa.int64())}), "scalars")


def test_dictionaries_that_arrow_cannot_unify_become_plain_text():
    """Arrow does not unify dictionaries that contain null themselves instead of in the codes."""
    with_null = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array(["a", None], pa.string()))
    without = pa.array(["b"], pa.string()).dictionary_encode()
    pieces = pa.chunked_array([with_null, without])
    with pytest.raises(pa.ArrowInvalid, match="unify"):
        pieces.unify_dictionaries()
    rows = pa.table({"run": ["r"] * 3, "type": ["note"] * 3, "message": pieces})

    assert ["a", None, "b"] == conform(rows, "events")["message"].to_pylist()


@pytest.mark.parametrize("names", [3, 2000])
def test_chunks_with_shared_dictionaries_keep_their_texts(names):
    """Each of two targets sends chunks with one dictionary in memory; the dictionaries have common names."""
    one, other = (pa.array([f"{head}{n % 1000}" for n in range(names)]).dictionary_encode() for head in ("", "0"))
    labels = pa.chunked_array([one, other.slice(1), one, other])
    required = {name: [""] * len(labels) for name in ("run", "target", "metric")}
    column = conform(pa.table({**required, "labels": labels}), "samples")["labels"]

    assert (1, labels.to_pylist()) == (column.num_chunks, column.to_pylist())


def test_rows_that_arrow_cannot_convert_raise_batch_error(monkeypatch):
    def cannot(*_):
        raise pa.ArrowCapacityError("array cannot contain more than 2147483646 bytes")

    monkeypatch.setattr("rankscope_storage.base.schema._cast", cannot)

    with pytest.raises(BatchError, match="rows of events cannot be converted to the schema of the store: array cannot"):
        conform(pa.table({"run": ["r"], "type": ["note"], "step": pa.array([1], pa.int32())}), "events")
