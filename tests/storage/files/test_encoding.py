"""Data files: all values are read back unchanged with every optimisation of the encoding; statistics and size."""

import datetime as dt
import errno
import io
import itertools
import json
import math
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import conform, dataset_schema
from rankscope_storage.files.encoding import ROW_GROUP_ROWS, discard, statistics, write_file, write_sorted
from rankscope_storage.files.filesystem import STAGING


def page_rows(path: Path, group: int, column: str) -> list[int]:
    """Return the number of values of each data page of the column `column` in the row group number `group`."""
    file = pq.ParquetFile(path)
    chunk = file.metadata.row_group(group).column(file.schema_arrow.get_field_index(column))
    return list(_page_rows(path.read_bytes(), chunk.data_page_offset, chunk.num_values))


def _page_rows(content: bytes, offset: int, values: int) -> Iterator[int]:
    while values:
        header, offset = _struct(content, offset)
        offset += header[3]  # compressed_page_size
        rows = header[5][1]  # data_page_header.num_values
        yield rows
        values -= rows


def _struct(content: bytes, at: int) -> tuple[dict[int, Any], int]:
    """Return the fields by number of the Thrift structure at `at`, in the compact protocol, and its end."""
    fields: dict[int, Any] = {}
    number = 0
    while kind := content[at]:
        number, at = number + (kind >> 4), at + 1  # Parquet has no structure with a gap of more than 15 numbers
        fields[number], at = _value(content, at, kind & 15)
    return fields, at + 1


def _value(content: bytes, at: int, kind: int) -> tuple[Any, int]:
    match kind:
        case 1 | 2:
            return kind == 1, at
        case 4 | 5 | 6:
            number, at = _varint(content, at)
            return (number >> 1) ^ -(number & 1), at
        case 8:
            size, at = _varint(content, at)
            return content[at : at + size], at + size
        case 12:
            return _struct(content, at)
        case _:
            raise ValueError(f"a page header has no field of the type {kind}")


def _varint(content: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = content[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at


INTEGER = st.one_of(st.none(), st.sampled_from([0, 7, -(1 << 62)]))
TEXT = st.one_of(st.none(), st.sampled_from(["", "full", "学"]))
NUMBER = st.one_of(st.none(), st.sampled_from([0.0, -0.0, 1.5, float("inf")]))
NAMES = ("tensor", "step", "placement", "shard_group", "norm", "nans")
ROW = st.tuples(st.sampled_from(["a", "b"]), INTEGER, TEXT, TEXT, NUMBER, INTEGER)
DELTA = "DELTA_BINARY_PACKED"
START = 1_790_000_000_000_000


def stored(table: pa.Table, path: Path | io.BytesIO, dataset: str = "tensor_stats") -> pq.ParquetFile:
    write_sorted(table, dataset, path)
    return pq.ParquetFile(path)


def rows_of(dataset: str = "tensor_stats", **columns: Any) -> pa.Table:
    """Return a table with these columns; the other required ones are `x` in each row."""
    schema = dataset_schema(dataset)
    count = len(next(iter(columns.values())))
    required = {field.name: ["x"] * count for field in schema if not field.nullable}
    made = {
        name: values if isinstance(values, pa.Array) else pa.array(values, schema.field(name).type)
        for name, values in (required | columns).items()
    }
    return conform(pa.table(made), dataset)


def coded(values: list[str | None]) -> pa.DictionaryArray:
    return pa.array(values, pa.string()).dictionary_encode()


def chunk(file: pq.ParquetFile, column: str, group: int = 0) -> pq.ColumnChunkMetaData:
    found = file.metadata.row_group(group)
    return next(one for one in map(found.column, range(found.num_columns)) if one.path_in_schema == column)


def times(micros: np.ndarray, mask: np.ndarray | None = None) -> pa.Array:
    return pa.array(START + micros, mask=mask).cast(pa.timestamp("us", tz="UTC"))


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(ROW, min_size=1, max_size=6), st.booleans())
def test_constant_null_and_mixed_columns_are_read_back_unchanged(rows, is_coded):
    columns = dict(zip(NAMES, map(list, zip(*rows, strict=True)), strict=True))
    for name in ("placement", "shard_group", "tensor") if is_coded else ():
        columns[name] = coded(columns[name])
    expected = sorted(rows, key=lambda row: (row[0], row[1] is None, row[1] or 0))
    content = stored(rows_of(**columns), io.BytesIO()).read()

    # The texts of the values distinguish -0.0 from 0.0.
    assert repr(expected) == repr([tuple(row[name] for name in NAMES) for row in content.to_pylist()])


def test_column_constant_in_only_one_row_group_is_read_back_unchanged(tmp_path):
    count = ROW_GROUP_ROWS + 1
    table = rows_of(tensor=coded(["a"] * count), step=list(range(count)), nans=[0] * ROW_GROUP_ROWS + [5])
    content = stored(table, tmp_path / "f")

    assert (0, 5) == (content.read_row_group(0)["nans"][0].as_py(), content.read_row_group(1)["nans"][0].as_py())


def test_null_inside_a_dictionary_is_read_back_as_null(tmp_path):
    odd = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array([None, "full"]))
    table = rows_of(tensor=["a", "a"], step=[1, 2])
    table = table.set_column(table.column_names.index("placement"), "placement", odd)

    assert [None, "full"] == stored(table, tmp_path / "f").read()["placement"].to_pylist()


def test_only_columns_without_nulls_are_written_as_required(tmp_path):
    file = stored(rows_of(tensor=coded(["a", "b"]), step=[1, None], nans=[0, 0]), tmp_path / "f")
    nullable = {field.name: field.nullable for field in file.schema_arrow}

    assert (False, True, False, True) == tuple(nullable[name] for name in ("tensor", "step", "nans", "norm"))


def test_integers_are_plain_if_all_are_zero_or_wide_and_else_differences(tmp_path):
    """Fastparquet returns wrong values for differences of more than 28 bits."""
    columns = {"seq": [1, 2], "nans": [0, 0], "micro_step": [7, 7], "ordinal": [1, 1 << 27], "numel": [1, 1 << 28]}
    file = stored(rows_of(tensor=coded(["a", "b"]), zeros=[None, 5], **columns), tmp_path / "f")

    expected = dict.fromkeys((*columns, "zeros"), DELTA) | {"nans": "PLAIN", "numel": "PLAIN"}
    assert expected == {name: (set(chunk(file, name).encodings) - {"RLE"}).pop() for name in expected}


def scalars(names: int, ranks: int, steps: int, pace: int = 300_000, *, shared: bool = True) -> pa.Table:
    """Return a row per step, rank and name. Steps are `pace` microseconds apart, with an irregular part."""
    # If `shared`, all names of a rank and step have the same time.
    step, rank, name = (one.ravel() for one in np.indices((steps, ranks, names)))
    ts = times(step * pace + step**2 % 997 + rank * 31 + (0 if shared else name * 17))
    texts = pa.DictionaryArray.from_arrays(pa.array(name.astype(np.int32)), [f"n{one}" for one in range(names)])
    return rows_of("scalars", rank=rank.astype(np.int32), step=step, ts=ts, name=texts, value=step / 7)


def widths(path: Path, name: str) -> Iterator[int]:
    """Yield the number of bits of the widest difference of `name`, per page with differences."""
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        if DELTA not in chunk(file, name, group).encodings:
            continue
        values = file.read_row_group(group, columns=[name])[name].cast(pa.int64()).combine_chunks()
        starts = np.cumsum([0, *page_rows(path, group, name)])
        for start, end in itertools.pairwise(starts.tolist()):
            differences = np.diff(values.slice(start, end - start).drop_null().to_numpy())
            yield (int(differences.max()) - int(differences.min())).bit_length() if len(differences) else 0


@pytest.mark.parametrize(
    ("shape", "shared", "encoding", "groups"),
    [
        *(((12, 4, 1_200), True, "PLAIN", 1), ((1, 1, 20_000), True, DELTA, 1), ((1, 4, 10_000), True, "PLAIN", 1)),
        *(((2, 2, 10_000), False, "PLAIN", 1), ((1, 64, 125), True, DELTA, 1), ((12, 4, 100), True, DELTA, 1)),
        *(((1, 3, 20_000), True, DELTA, 3), ((2, 1, 70_000), False, DELTA, 4)),
    ],
)
def test_times_of_scalars_have_no_wide_differences(tmp_path, shape, shared, encoding, groups):
    """Fastparquet returns wrong values if differences in a page differ by 2^28."""
    table = scalars(*shape, shared=shared)
    file = stored(table, tmp_path / "f", "scalars")

    assert encoding in chunk(file, "ts").encodings
    assert all(width <= 28 for width in widths(tmp_path / "f", "ts"))
    assert groups == file.num_row_groups
    assert all(1 == len(page_rows(tmp_path / "f", group, "ts")) for group in range(groups))
    assert Counter(table["ts"].to_pylist()) == Counter(file.read()["ts"].to_pylist())


def test_memory_of_a_wide_difference_in_each_row_is_that_of_an_array():
    table = scalars(1, 1, 50_000)
    table = table.set_column(table.column_names.index("ts"), "ts", times(np.arange(50_000) ** 2 * 1_000_000))
    tracemalloc.start()
    try:
        write_sorted(table, "scalars", io.BytesIO())
        assert tracemalloc.get_traced_memory()[1] < 50 * table.num_rows
    finally:
        tracemalloc.stop()


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(-(1 << 62), 1 << 62), st.integers(1, 700)), min_size=1, max_size=6),
    st.lists(st.integers(-(1 << 40), 1 << 40), min_size=1, max_size=3),
    st.sets(st.integers(0, 4_000), max_size=5),
)
def test_integers_with_wide_differences_are_read_back_unchanged(tmp_path_factory, series, paces, nulls):
    numbers = [
        value
        for number, (first, count) in enumerate(series)
        for value in (first + paces[number % len(paces)] * np.arange(count)).tolist()
    ]
    expected = [None if place in nulls else value for place, value in enumerate(numbers)]
    path = tmp_path_factory.mktemp("integers") / "f"
    file = stored(rows_of("scalars", step=np.arange(len(expected)), seq=expected), path, "scalars")

    assert expected == file.read()["seq"].to_pylist()
    assert all(width <= 28 for width in widths(path, "seq"))


@pytest.mark.parametrize(
    ("dataset", "column", "values", "path", "is_plain"),
    [
        ("hashes", "hash", [-(1 << 63), 0, (1 << 63) - 1], "hash", True),
        ("hashes", "hash", [5, 6, 7], "hash", False),
        ("histograms", "counts", [[1, 1 << 40], [3]], "counts.list.element", True),
    ],
)
def test_hashes_and_integers_in_lists_are_plain_if_they_are_wide(tmp_path, dataset, column, values, path, is_plain):
    table = rows_of(dataset, **{column: values, "step": list(range(len(values)))})
    file = stored(table, tmp_path / "f", dataset)

    assert is_plain != (DELTA in chunk(file, path).encodings)
    assert values == file.read()[column].to_pylist()


def test_row_group_dictionary_has_only_the_names_of_its_rows(tmp_path):
    """Exporters have labels by the hundred thousand; in each row group they would be most of the file."""
    count = 2 * ROW_GROUP_ROWS
    names = [f"{number:032d}" for number in range(count)]
    labels = pa.DictionaryArray.from_arrays(pa.array([*range(count - 1), None], pa.int32()), pa.array(names))
    file = stored(rows_of("samples", labels=labels), tmp_path / "f", "samples")
    sizes = [chunk(file, "labels", group).total_uncompressed_size for group in range(2)]

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
    file = stored(rows_of("samples", labels=labels), tmp_path / "f", "samples")
    expected = Counter(None if code is None else names[code] for code in codes)

    assert expected == Counter(file.read()["labels"].to_pylist())
    assert (
        chunk(file, "labels").total_uncompressed_size < len(names) * 9 / 2
    )  # 9 bytes per name: only a part is written


@pytest.mark.parametrize("names", [1, 255, 256, 257])
@pytest.mark.parametrize("order", [1, -1])
def test_names_with_one_byte_and_wider_codes_are_read_back(tmp_path, names, order):
    """The footer has the range of the names. The code of a null has no meaning."""
    used = [f"{number:03d}" for number in range(names)]
    tensors = [name for name in used for _ in range(3)][::order]
    placements = [None if number % 3 else used[number // 3] for number in range(3 * names)]
    file = stored(rows_of(tensor=coded(tensors), placement=coded(placements)), tmp_path / "f")
    found = file.read()
    range_ = chunk(file, "tensor").statistics

    pairs = zip(found["tensor"].to_pylist(), found["placement"].to_pylist(), strict=True)
    assert Counter(zip(tensors, placements, strict=True)) == Counter(pairs)
    assert (used[0], used[-1]) == (range_.min, range_.max)


def test_samples_of_a_series_are_adjacent_and_sorted_by_time(tmp_path):
    rows = [(label, time) for time in range(3) for label in ("b", "a", None, "c")]
    labels, micros = zip(*rows, strict=True)
    content = stored(rows_of("samples", labels=labels, ts=micros), tmp_path / "f", "samples").read()
    found = list(zip(content["labels"].to_pylist(), content["ts"].cast(pa.int64()).to_pylist(), strict=True))

    assert sorted(map(repr, rows)) == sorted(map(repr, found))
    assert [0, 1, 2] * 4 == [time for _, time in found]
    assert 4 == len({label for label, _ in found[::3]})


@pytest.mark.parametrize(("dataset", "is_told"), [("scalars", True), ("samples", False)])
def test_footer_of_scalars_has_the_range_of_labels(tmp_path, dataset, is_told):
    """A query for the loss then skips reading the labels."""
    found = chunk(stored(rows_of(dataset, value=[1.0]), tmp_path / "f", dataset), "labels").statistics

    assert is_told == (found is not None and found.null_count == 1)


# --- the file in the store, and its statistics for the log


@pytest.fixture
def root(tmp_path):
    (tmp_path / STAGING).mkdir()
    return tmp_path


def test_file_gets_its_name_only_after_fsync(root):
    """The file below `_staging/` is fsynced and renamed, then all folders of its path are fsynced."""
    seen = []
    file = write_file(root, "tensor_stats", "p", rows_of(step=[1]), seen.append)

    assert [] == list((root / STAGING).iterdir())
    assert root / STAGING == seen.pop(1).parent
    assert [root, root, root / "dataset=tensor_stats", root / "dataset=tensor_stats" / "part=p"] == seen
    assert (root / file.path).stat().st_size == file.size_bytes


def test_discard_deletes_files_and_is_idempotent(root, monkeypatch):
    """If a file cannot be deleted, the others are, and the error of the write is the important one."""
    file, other = (write_file(root, "tensor_stats", "p", rows_of(step=[1]), sync_to_disk) for _ in range(2))
    genuine = Path.unlink

    def refuse(path, missing_ok=False):
        if path == root / file.path:
            raise OSError(errno.EROFS, "Read-only file system")
        genuine(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.unlink", refuse)
        discard(root, [file, other])

    assert [True, False] == [(root / one.path).exists() for one in (file, other)]
    discard(root, [file, file])
    assert not (root / file.path).exists()


def test_statistics_have_ranges_without_nulls_and_without_floats():
    moment = dt.datetime(2026, 11, 20, 1, 2, 3, 456789, tzinfo=dt.UTC)
    table = rows_of(
        run=["b", "a\n'\"学", "b"],
        step=[3, None, -1],
        ts=pa.array([moment, None, moment + dt.timedelta(hours=1)], pa.timestamp("us", tz="UTC")),
        norm=pa.array([math.nan, 1, 2], pa.float32()),
    )
    document = json.loads(statistics(table))

    assert 3 == document["numRecords"]
    assert {"run": "a\n'\"学", "step": -1, "ts": "2026-11-20T01:02:03.456789Z"} == document["minValues"]
    assert {"run": "b", "step": 3, "ts": "2026-11-20T02:02:03.456789Z"} == document["maxValues"]
    assert {"run": 0, "attempt": 3, "rank": 3, "step": 1, "ts": 1} == document["nullCount"]


@pytest.mark.parametrize("ts", [2**62, -(2**62), 253_402_300_800_000_000, -30_610_224_000_000_001])
def test_time_outside_of_the_calendar_omits_only_the_range_of_ts(ts):
    table = rows_of(step=[1, 2], ts=pa.array([0, ts], pa.int64()).cast(pa.timestamp("us", tz="UTC")))
    document = json.loads(statistics(table))

    assert (1, 2) == (document["minValues"]["step"], document["maxValues"]["step"])
    assert "ts" not in document["minValues"] | document["maxValues"]


def test_file_of_realistic_noise_is_little_larger_than_its_entropy(root):
    """Six noisy numbers per row, 2.06 bytes each in the reference; a float dictionary or missing sort needs more."""
    noise = np.random.default_rng(1)
    tensors, ranks, steps = 50, 4, 200
    count = tensors * ranks * steps
    step, rank, tensor = (grid.ravel() for grid in np.indices((steps, ranks, tensors)))
    scale = np.exp(noise.normal(0, 2, tensors))[tensor]
    norm = scale * (1 + noise.normal(0, 0.03, count))
    ops = {"norm": norm, "min": -norm * (1 + noise.normal(0, 0.08, count))}
    ops |= {"max": norm * (1 + noise.normal(0, 0.08, count)), "mean": norm * noise.normal(0, 0.3, count)}
    table = rows_of(
        tensor=pa.array([f"layers.{number}.weight" for number in tensor]),
        rank=rank,
        step=step,
        ts=pa.array(step * 500_000, pa.timestamp("us", tz="UTC")),
        **{name: values.astype(np.float32) for name, values in ops.items()},
        nans=np.zeros(count, np.int64),
        zeros=np.where(tensor % 4 == 0, noise.poisson(100, count), 0),
    )
    file = write_file(root, "tensor_stats", "p", table, sync_to_disk)

    assert file.size_bytes / (count * 6) < 2.4
