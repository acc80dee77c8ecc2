"""The content of a data file: all values are read back unchanged, with every optimisation of the encoding."""

from __future__ import annotations

import io
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties import examples
from tests.storage.files.page_headers import page_rows

from rankscope_storage.base.schema import conform, dataset_schema
from rankscope_storage.files.encoding import ROW_GROUP_ROWS, write_sorted
from rankscope_storage.files.sorting import is_constant

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
    """Return the values as text, which distinguishes -0.0 from 0.0."""
    return [repr(row[name]) for name in NAMES]


def rows_of(columns: dict[str, list[object]], *, coded: bool) -> pa.Table:
    count = len(columns["tensor"])
    schema = dataset_schema("tensor_stats")
    arrays = {name: pa.array(values, schema.field(name).type) for name, values in columns.items()}
    arrays |= {name: pa.array(["x"] * count) for name in ("run", "kind")}
    for name in {"placement", "shard_group", "tensor"} & arrays.keys() if coded else ():
        arrays[name] = arrays[name].dictionary_encode()
    return conform(pa.table(arrays), "tensor_stats")


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(ROW, min_size=1, max_size=6), st.booleans())
def test_constant_null_and_mixed_columns_are_read_back_unchanged(rows, coded):
    table = rows_of({name: [row[name] for row in rows] for name in NAMES}, coded=coded)
    expected = sorted(
        rows, key=lambda row: (row["tensor"], row["step"] is None, 0 if row["step"] is None else row["step"])
    )
    content = stored(table, io.BytesIO()).read()

    assert [texts(row) for row in expected] == [texts(row) for row in content.to_pylist()]


def test_column_constant_in_only_one_row_group_is_read_back_unchanged(tmp_path):
    count = ROW_GROUP_ROWS + 1
    steps = list(range(count))
    last = [0] * ROW_GROUP_ROWS + [5]
    content = stored(rows_of({"tensor": ["a"] * count, "step": steps, "nans": last}, coded=True), tmp_path / "f")

    assert (0, 5) == (content.read_row_group(0)["nans"][0].as_py(), content.read_row_group(1)["nans"][0].as_py())


def test_null_inside_a_dictionary_is_read_back_as_null(tmp_path):
    odd = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array([None, "full"]))
    table = rows_of({"tensor": ["a", "a"], "step": [1, 2]}, coded=False)
    table = table.set_column(table.column_names.index("placement"), "placement", odd)

    assert [None, "full"] == stored(table, tmp_path / "f").read()["placement"].to_pylist()


def test_only_columns_without_nulls_are_written_as_required(tmp_path):
    file = stored(rows_of({"tensor": ["a", "b"], "step": [1, None], "nans": [0, 0]}, coded=True), tmp_path / "f")
    nullable = {field.name: field.nullable for field in file.schema_arrow}

    assert (False, True, False, True) == tuple(nullable[name] for name in ("tensor", "step", "nans", "norm"))


def test_integers_are_plain_if_all_are_zero_and_else_differences(tmp_path):
    columns = {"tensor": ["a", "b"], "seq": [1, 2], "nans": [0, 0], "numel": [7, 7]}
    group = stored(rows_of(columns, coded=True), tmp_path / "f").metadata.row_group(0)
    encodings = {chunk.path_in_schema: chunk.encodings for chunk in map(group.column, range(group.num_columns))}

    assert {"PLAIN", "RLE"} == set(encodings["nans"])
    assert {"DELTA_BINARY_PACKED", "RLE"} == set(encodings["seq"]) == set(encodings["numel"])


def test_wide_integers_of_tensors_are_plain(tmp_path):
    """Fastparquet returns wrong values for differences of more than 28 bits."""
    columns = {"tensor": ["a", "b"], "ordinal": [1, 1 << 27], "numel": [1, 1 << 28], "zeros": [None, 5]}
    group = stored(rows_of(columns, coded=True), tmp_path / "f").metadata.row_group(0)
    encodings = {chunk.path_in_schema: chunk.encodings for chunk in map(group.column, range(group.num_columns))}

    assert {"DELTA_BINARY_PACKED", "RLE"} == set(encodings["ordinal"]) == set(encodings["zeros"])
    assert {"PLAIN", "RLE"} == set(encodings["numel"])


def scalars(names: int, ranks: int, steps: int, pace: int = 300_000, *, shared: bool = True) -> pa.Table:
    """Return a row per step, rank and name. Steps are `pace` microseconds apart, with an irregular part.

    If `shared`, all names of a rank and step have the same time.
    """
    step, rank, name = (one.ravel() for one in np.indices((steps, ranks, names)))
    ts = 1_790_000_000_000_000 + step * pace + step**2 % 997 + rank * 31 + (0 if shared else name * 17)
    columns = {
        **{key: [text] * len(step) for key, text in {"run": "r", "incarnation": "i", "ts_origin": "rank"}.items()},
        "attempt": np.zeros(len(step), np.int32),
        "rank": rank.astype(np.int32),
        "step": step,
        "ts": pa.array(ts).cast(pa.timestamp("us", tz="UTC")),
        "name": pa.DictionaryArray.from_arrays(pa.array(name.astype(np.int32)), [f"n{one}" for one in range(names)]),
        "value": step / 7,
    }
    return conform(pa.table(columns), "scalars")


def widths(path: Path, name: str) -> Iterator[int]:
    """Yield the number of bits of the widest difference of `name`, per page with differences."""
    file = pq.ParquetFile(path)
    place = file.schema_arrow.get_field_index(name)
    for group in range(file.num_row_groups):
        if "DELTA_BINARY_PACKED" not in file.metadata.row_group(group).column(place).encodings:
            continue
        values = file.read_row_group(group, columns=[name])[name].cast(pa.int64()).combine_chunks()
        starts = np.cumsum([0, *page_rows(path, group, name)])
        for start, end in itertools.pairwise(starts.tolist()):
            differences = np.diff(values.slice(start, end - start).drop_null().to_numpy())
            yield (int(differences.max()) - int(differences.min())).bit_length() if len(differences) else 0


@pytest.mark.usual(4)
@pytest.mark.parametrize(
    ("shape", "shared", "encoding", "pages"),
    [
        ((12, 4, 600), True, "PLAIN", [28_800]),
        ((1, 1, 20_000), True, "DELTA_BINARY_PACKED", [20_000]),
        ((1, 4, 10_000), True, "DELTA_BINARY_PACKED", [10_000] * 4),
        ((2, 2, 10_000), False, "DELTA_BINARY_PACKED", [10_000] * 4),
        ((3, 1, 30_000), False, "DELTA_BINARY_PACKED", [30_000, 30_000, 5_536]),
        ((1, 8, 1_000), True, "DELTA_BINARY_PACKED", [1_000] * 8),
        ((1, 64, 450), True, "DELTA_BINARY_PACKED", [450] * 64),
        ((1, 64, 125), True, "DELTA_BINARY_PACKED", [8_000]),
        ((1, 64, 100, 3_000_000), True, "DELTA_BINARY_PACKED", [100] * 64),
        ((12, 4, 100), True, "DELTA_BINARY_PACKED", [4_800]),
    ],
)
def test_times_of_scalars_have_no_wide_differences(tmp_path, shape, shared, encoding, pages):
    """Fastparquet returns wrong values if differences in a page differ by 2^28."""
    table = scalars(*shape, shared=shared)
    write_sorted(table, "scalars", tmp_path / "f")
    file = pq.ParquetFile(tmp_path / "f")
    chunk = file.metadata.row_group(0).column(file.schema_arrow.get_field_index("ts"))

    assert encoding in chunk.encodings
    assert all(width <= 28 for width in widths(tmp_path / "f", "ts"))
    assert pages == page_rows(tmp_path / "f", 0, "ts")
    assert -(-table.num_rows // ROW_GROUP_ROWS) == file.num_row_groups
    assert [min(table.num_rows, ROW_GROUP_ROWS)] == page_rows(tmp_path / "f", 0, "step")
    assert Counter(table["ts"].to_pylist()) == Counter(file.read()["ts"].to_pylist())


def written_times(path: Path, seconds: np.ndarray, *, nulls: tuple[int, ...] = ()) -> pq.ColumnChunkMetaData:
    """Write one series of scalars with these times to `path`; return the column `ts` of the first row group."""
    valid = np.ones(len(seconds), np.bool_)
    valid[list(nulls)] = False
    times = pa.array(1_790_000_000_000_000 + np.rint(seconds * 1e6).astype(np.int64), mask=~valid)
    required = {name: ["x"] * len(seconds) for name in ("run", "name")}
    ts = times.cast(pa.timestamp("us", tz="UTC"))
    table = conform(pa.table({**required, "step": np.arange(len(seconds)), "ts": ts}), "scalars")
    write_sorted(table, "scalars", path)
    file = pq.ParquetFile(path)

    assert ts.to_pylist() == file.read()["ts"].to_pylist()
    assert all(width <= 28 for width in widths(path, "ts"))
    return file.metadata.row_group(0).column(file.schema_arrow.get_field_index("ts"))


@pytest.mark.parametrize("pace", [130, 140, 300, 3_600])
def test_long_steps_of_equal_length_need_one_page(tmp_path, pace):
    """Differences may be wide if they are nearly equal."""
    seconds = pace * (np.arange(2_000) + np.random.default_rng(1).uniform(-0.001, 0.001, 2_000))
    chunk = written_times(tmp_path / "f", seconds)

    assert "DELTA_BINARY_PACKED" in chunk.encodings
    assert [2_000] == page_rows(tmp_path / "f", 0, "ts")


def test_pauses_in_a_series_are_at_the_ends_of_pages(tmp_path):
    step = np.arange(1_000)
    chunk = written_times(tmp_path / "f", 2.0 * step + 200.0 * (step // 250))

    assert "DELTA_BINARY_PACKED" in chunk.encodings
    assert [250] * 4 == page_rows(tmp_path / "f", 0, "ts")


def test_two_paces_have_a_page_each(tmp_path):
    chunk = written_times(tmp_path / "f", np.cumsum(np.repeat([2.0, 600.0], 300)))

    assert "DELTA_BINARY_PACKED" in chunk.encodings
    assert [300, 300] == page_rows(tmp_path / "f", 0, "ts")


def test_nulls_do_not_make_times_plain(tmp_path):
    step = np.arange(1_000)
    chunk = written_times(tmp_path / "f", 2.0 * step + 200.0 * (step // 500), nulls=(3, 499, 500))

    assert "DELTA_BINARY_PACKED" in chunk.encodings
    assert 2 == len(page_rows(tmp_path / "f", 0, "ts"))


@pytest.mark.parametrize("first", ["a", "z"])
def test_times_are_plain_if_most_of_them_are_repeated_anywhere(tmp_path, first):
    """A long series of one name comes before or after those of many names, in other row groups."""
    own, shared = scalars(1, 1, 100_000), scalars(40, 4, 2_000)
    own = own.set_column(own.column_names.index("name"), "name", pa.array([first] * own.num_rows).dictionary_encode())
    write_sorted(pa.concat_tables([own, shared]).unify_dictionaries(), "scalars", tmp_path / "f")
    file = pq.ParquetFile(tmp_path / "f")

    assert "PLAIN" in file.metadata.row_group(0).column(file.schema_arrow.get_field_index("ts")).encodings


def test_events_in_the_order_of_their_times_have_differences(tmp_path):
    """Their pages cannot be short, but no difference is wide."""
    ts = pa.array(1_790_000_000_000_000 + 1_000_000 * np.arange(5_000)).cast(pa.timestamp("us", tz="UTC"))
    required = {name: ["x"] * len(ts) for name in ("run", "type", "message")}
    write_sorted(conform(pa.table({**required, "ts": ts}), "events"), "events", tmp_path / "f")
    file = pq.ParquetFile(tmp_path / "f")

    assert "DELTA_BINARY_PACKED" in file.metadata.row_group(0).column(file.schema_arrow.get_field_index("ts")).encodings


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(-(1 << 62), 1 << 62), st.integers(1, 700)), min_size=1, max_size=6),
    st.lists(st.integers(-(1 << 40), 1 << 40), min_size=1, max_size=3),
    st.sets(st.integers(0, 4_000), max_size=5),
)
def test_integers_with_wide_differences_are_read_back_unchanged(tmp_path_factory, series, paces, nulls):
    seq = np.concatenate(
        [first + paces[number % len(paces)] * np.arange(count) for number, (first, count) in enumerate(series)]
    )
    expected = [None if place in nulls else value for place, value in enumerate(seq.tolist())]
    required = {name: ["x"] * len(seq) for name in ("run", "name")}
    values = pa.array(expected, pa.int64())
    table = conform(pa.table({**required, "step": np.arange(len(seq)), "seq": values}), "scalars")
    path = tmp_path_factory.mktemp("integers") / "f"
    write_sorted(table, "scalars", path)

    assert expected == pq.read_table(path)["seq"].to_pylist()
    assert all(width <= 28 for width in widths(path, "seq"))


@pytest.mark.parametrize("hashes", [[-(1 << 63), 0, (1 << 63) - 1], [5, 6, 7]])
def test_hashes_are_plain_if_they_are_wide(tmp_path, hashes):
    required = {name: ["x"] * 3 for name in ("run", "kind", "tensor")}
    table = conform(pa.table({**required, "hash": hashes, "step": [1, 2, 3]}), "hashes")
    write_sorted(table, "hashes", tmp_path / "f")
    file = pq.ParquetFile(tmp_path / "f")
    chunk = file.metadata.row_group(0).column(file.schema_arrow.get_field_index("hash"))

    assert ("DELTA_BINARY_PACKED" in chunk.encodings) == (hashes == [5, 6, 7])
    assert hashes == file.read()["hash"].to_pylist()


def test_wide_integers_in_lists_are_plain(tmp_path):
    required = {name: ["x"] * 2 for name in ("run", "kind", "tensor", "scheme")}
    counts = [[1, 1 << 40], [3]]
    table = conform(pa.table({**required, "counts": pa.array(counts, pa.list_(pa.int64()))}), "histograms")
    write_sorted(table, "histograms", tmp_path / "f")
    file = pq.ParquetFile(tmp_path / "f")
    paths = {
        chunk.path_in_schema: chunk
        for chunk in map(file.metadata.row_group(0).column, range(file.metadata.num_columns))
    }

    assert "DELTA_BINARY_PACKED" not in paths["counts.list.element"].encodings
    assert counts == file.read()["counts"].to_pylist()


@pytest.mark.parametrize("jitter", [0, 100, 300, 3_000, 30_000])
def test_times_of_tensors_take_few_bytes_with_any_jitter(tmp_path, jitter):
    """The first level of zstd takes more than a byte per row for times whose differences vary by 0.1 ms."""
    tensors, ranks, steps = 16, 64, 50
    tensor, rank, step = (one.ravel() for one in np.indices((tensors, ranks, steps)))
    noise = np.random.default_rng(3).integers(0, jitter + 1, (ranks, steps))
    ts = pa.array(1_790_000_000_000_000 + step * 3_000_000 + noise[rank, step]).cast(pa.timestamp("us", tz="UTC"))
    names = [f"{one:02d}" for one in tensor]
    rows = rows_of({"tensor": names, "rank": rank, "step": step, "ts": ts}, coded=True)
    group = stored(rows, tmp_path / "f").metadata.row_group(0)
    (size,) = (
        chunk.total_compressed_size
        for chunk in map(group.column, range(group.num_columns))
        if chunk.path_in_schema == "ts"
    )

    assert size / len(ts) < 0.5


def test_row_group_has_one_page_per_float_column(tmp_path):
    """Each of the four byte streams of a page is as long as a block of zstd."""
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
def test_is_constant_is_true_only_for_equal_values(values, same):
    assert same == is_constant(values)


def test_row_group_dictionary_has_only_the_names_of_its_rows(tmp_path):
    """Exporters have labels by the hundred thousand; in each row group they would be most of the file."""
    count = 2 * ROW_GROUP_ROWS
    names = [f"{number:032d}" for number in range(count)]
    labels = pa.DictionaryArray.from_arrays(pa.array([*range(count - 1), None], pa.int32()), pa.array(names))
    required = {"run": [""] * count, "target": ["t"] * count, "metric": ["m"] * count}
    table = conform(pa.table({**required, "labels": labels}), "samples")
    write_sorted(table, "samples", tmp_path / "f")
    file = pq.ParquetFile(tmp_path / "f")
    place = file.schema_arrow.get_field_index("labels")
    sizes = [file.metadata.row_group(group).column(place).total_uncompressed_size for group in range(2)]

    assert max(sizes) < ROW_GROUP_ROWS * (4 + 32 + 4)
    assert [*names[:-1], None] == sorted(file.read()["labels"].to_pylist(), key=lambda name: (name is None, name))


@pytest.mark.parametrize(
    "codes",
    [
        [None] * 5,
        [9_999, 9_998, None, 9_999],  # adjacent codes at the end of the dictionary
        [4_000, 4_001, 8_096],  # one code more than the largest permitted distance
        [4_000, 4_001, 8_097],
        [0, 9_999, 5_000, None, 0],
    ],
)
def test_names_at_any_position_of_a_large_dictionary_are_read_back(tmp_path, codes):
    names = [f"{number:05d}" for number in range(10_000)]
    labels = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(names))
    required = {name: ["x"] * len(codes) for name in ("run", "target", "metric")}
    write_sorted(conform(pa.table({**required, "labels": labels}), "samples"), "samples", tmp_path / "f")
    file = pq.ParquetFile(tmp_path / "f")
    expected = [None if code is None else names[code] for code in codes]
    size = file.metadata.row_group(0).column(file.schema_arrow.get_field_index("labels")).total_uncompressed_size

    assert Counter(expected) == Counter(file.read()["labels"].to_pylist())
    assert size < len(names) * 9 / 2  # 9 bytes per name: only a part is written


@pytest.mark.parametrize("names", [1, 255, 256, 257])
@pytest.mark.parametrize("order", ["sorted", "turned round"])
def test_names_with_one_byte_and_wider_codes_are_read_back(tmp_path, names, order):
    """The footer has the range of the names. The code of a null has no meaning."""
    used = [f"{number:03d}" for number in range(names)]
    tensors = [name for name in used for _ in range(3)][:: 1 if order == "sorted" else -1]
    placements = [None if number % 3 else used[number // 3] for number in range(3 * names)]
    rows = rows_of({"tensor": tensors, "placement": placements}, coded=True)
    file = stored(conform(rows, "tensor_stats"), tmp_path / "f.parquet")
    tensor = next(
        column
        for column in map(file.metadata.row_group(0).column, range(file.metadata.num_columns))
        if column.path_in_schema == "tensor"
    )

    table = file.read()
    assert Counter(zip(tensors, placements, strict=True)) == Counter(
        zip(table.column("tensor").to_pylist(), table.column("placement").to_pylist(), strict=True)
    )
    assert (used[0], used[-1]) == (tensor.statistics.min, tensor.statistics.max)


def test_samples_of_a_series_are_adjacent_and_sorted_by_time(tmp_path):
    rows = [(label, time) for time in range(3) for label in ("b", "a", None, "c")]
    times = pa.array([time for _, time in rows], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    required = {name: ["x"] * len(rows) for name in ("run", "target", "metric")}
    table = conform(pa.table({**required, "labels": [label for label, _ in rows], "ts": times}), "samples")
    write_sorted(table, "samples", tmp_path / "f")
    content = pq.ParquetFile(tmp_path / "f").read()
    found = list(zip(content["labels"].to_pylist(), content["ts"].cast(pa.int64()).to_pylist(), strict=True))

    assert sorted(map(repr, rows)) == sorted(map(repr, found))
    assert [0, 1, 2] * 4 == [time for _, time in found]
    assert 4 == len({label for label, _ in found[::3]})


@pytest.mark.parametrize(("dataset", "is_told"), [("scalars", True), ("samples", False)])
def test_footer_of_scalars_has_the_range_of_labels(tmp_path, dataset, is_told):
    """A query for the loss then skips reading the labels."""
    rows = pa.Table.from_pylist([{"run": "r", "value": 1.0}], schema=dataset_schema(dataset))
    write_sorted(rows, dataset, tmp_path / "f.parquet")
    group = pq.ParquetFile(tmp_path / "f.parquet").metadata.row_group(0)
    column = next(group.column(i) for i in range(group.num_columns) if group.column(i).path_in_schema == "labels")

    assert is_told == (column.statistics is not None and column.statistics.null_count == 1)
