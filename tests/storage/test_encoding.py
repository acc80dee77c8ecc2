"""The inside of a file: every value comes back, whatever was left out of the work on the way."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope_storage.encoding import ROW_GROUP_ROWS, write_sorted
from rankscope_storage.layout import is_constant
from rankscope_storage.schema import conform, dataset_schema

INTEGER = st.one_of(st.none(), st.sampled_from([0, 7, -(1 << 62)]))
TEXT = st.one_of(st.none(), st.sampled_from(["", "full", "学"]))
NAMES = ("tensor", "step", "placement", "shard_group", "norm", "nans")
ROW = st.fixed_dictionaries(
    {
        "tensor": st.sampled_from(["a", "b"]),
        "step": INTEGER,
        "placement": TEXT,
        "shard_group": TEXT,
        "norm": st.one_of(st.none(), st.sampled_from([0.0, -0.0, 1.5, float("inf")])),
        "nans": INTEGER,
    }
)


def stored(table: pa.Table, path: Path | io.BytesIO) -> pq.ParquetFile:
    write_sorted(table, "tensor_stats", path)
    return pq.ParquetFile(path)


def texts(row: dict[str, object]) -> list[str]:
    """In words, where -0.0 is not 0.0."""
    return [repr(row[name]) for name in NAMES]


def rows_of(columns: dict[str, list[object]], *, coded: bool) -> pa.Table:
    count = len(columns["tensor"])
    schema = dataset_schema("tensor_stats")
    arrays = {name: pa.array(values, schema.field(name).type) for name, values in columns.items()}
    arrays |= {name: pa.array(["x"] * count) for name in ("run", "kind")}
    for name in {"placement", "shard_group", "tensor"} & arrays.keys() if coded else ():
        arrays[name] = arrays[name].dictionary_encode()
    return conform(pa.table(arrays), "tensor_stats")


@settings(max_examples=40, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=6), st.booleans())
def test_constant_null_and_mixed_columns_come_back_as_they_were(rows, coded):
    table = rows_of({name: [row[name] for row in rows] for name in NAMES}, coded=coded)
    expected = sorted(
        rows, key=lambda row: (row["tensor"], row["step"] is None, 0 if row["step"] is None else row["step"])
    )
    content = stored(table, io.BytesIO()).read()

    assert [texts(row) for row in expected] == [texts(row) for row in content.to_pylist()]


def test_what_is_constant_in_one_row_group_and_not_in_the_next_is_kept(tmp_path):
    count = ROW_GROUP_ROWS + 1
    steps = list(range(count))
    last = [0] * ROW_GROUP_ROWS + [5]
    content = stored(rows_of({"tensor": ["a"] * count, "step": steps, "nans": last}, coded=True), tmp_path / "f")

    assert (0, 5) == (content.read_row_group(0)["nans"][0].as_py(), content.read_row_group(1)["nans"][0].as_py())


def test_a_null_that_stands_in_the_dictionary_itself_stays_null(tmp_path):
    odd = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array([None, "full"]))
    table = rows_of({"tensor": ["a", "a"], "step": [1, 2]}, coded=False)
    table = table.set_column(table.column_names.index("placement"), "placement", odd)

    assert [None, "full"] == stored(table, tmp_path / "f").read()["placement"].to_pylist()


def test_a_column_without_nulls_is_written_as_required_and_any_other_is_not(tmp_path):
    file = stored(rows_of({"tensor": ["a", "b"], "step": [1, None], "nans": [0, 0]}, coded=True), tmp_path / "f")
    nullable = {field.name: field.nullable for field in file.schema_arrow}

    assert (False, True, False, True) == tuple(nullable[name] for name in ("tensor", "step", "nans", "norm"))


def test_a_row_group_has_one_page_of_each_float_column(tmp_path):
    """The four streams of a page are each as long as a block of zstd."""
    count = ROW_GROUP_ROWS
    norms = [float(number % 251) for number in range(count)]
    file = stored(rows_of({"tensor": ["a"] * count, "step": [1] * count, "norm": norms}, coded=True), tmp_path / "f")
    group = file.metadata.row_group(0)
    (norm,) = (
        group.column(place) for place in range(group.num_columns) if group.column(place).path_in_schema == "norm"
    )

    assert count * 4 <= norm.total_uncompressed_size < count * 4 + 100


@pytest.mark.parametrize(
    ("values", "same"),
    [
        (pa.array([], pa.int32()), True),
        (pa.array([None, None], pa.int32()), True),
        (pa.array([3, None], pa.int32()), False),
        (pa.array([3, 3]), True),
        (pa.array(["a", "a", "b"]).dictionary_encode(), False),
        (pa.array(["b", "a", "a"]).dictionary_encode().slice(1), True),
        (pa.array([2**62] * 2, pa.timestamp("us", tz="UTC")), True),
        (pa.array([0.0, -0.0]), False),
    ],
)
def test_what_is_called_constant_is(values, same):
    assert same == is_constant(values)
