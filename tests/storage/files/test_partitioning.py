"""Partitions and sort orders, columns that are not written, and rounded statistics."""

import datetime as dt
import math
from fractions import Fraction
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.properties import examples
from tests.storage.rows import ask, entries, files, put, table

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import UNWRITTEN, dataset_schema
from rankscope_storage.files.encoding import FEWEST_BITS, MANTISSA_BITS_KEY, MOST_BITS, round_bits, rounded
from rankscope_storage.files.sorting import (
    LONGEST_PART,
    OWN_PART_ROWS,
    file_mantissa_bits,
    own_part,
    parts,
    sort_order,
)
from rankscope_storage.log.delta import Log
from rankscope_storage.maintenance import compaction
from rankscope_storage.maintenance.check import check
from rankscope_storage.maintenance.retention import Retention, retain
from rankscope_storage.maintenance.stats import store_stats
from rankscope_storage.runs.edit import rename

TODAY = dt.date(2026, 11, 20)


def test_run_with_100000_rows_gets_a_separate_part():
    """A dictionary may contain its name twice."""
    names = ["big"] * OWN_PART_ROWS + ["small"] * (OWN_PART_ROWS - 1) + ["tiny"]
    twice = pa.DictionaryArray.from_arrays(pa.array([0, 1] * (OWN_PART_ROWS // 2)), pa.array(["r", "r"]))
    found = {part: rows.num_rows for part, rows in parts(pa.table({"run": names}), "scalars", TODAY)}

    assert {"big": OWN_PART_ROWS, "_shared-2026-11-20": OWN_PART_ROWS} == found
    assert ["r"] == [part for part, _ in parts(pa.table({"run": twice}), "scalars", TODAY)]


def test_samples_are_partitioned_by_day_and_without_ts_by_today():
    day = 86_400_000_000
    table = pa.table({"run": ["r"] * 4, "ts": pa.array([0, day - 1, day, None], pa.timestamp("us", tz="UTC"))})

    found = {part: rows.num_rows for part, rows in parts(table, "samples", TODAY)}
    assert {"1970-01-01": 2, "1970-01-02": 1, "2026-11-20": 1} == found


def test_part_is_one_safe_folder_name_for_any_run_name():
    for name in ("a/b", "..", "a=b", 'it\'s "q"', "学习", "123", "2026-11-20", "", ".hidden", "x" * 60):
        part = own_part(name)

        assert not set(part) & set("/\\='\" ")
        assert part not in {"", ".", ".."}
        assert name == ("" if part == "%" else unquote(part))
    long = own_part("学" * 100)
    assert ("学" * 20, 1) == (unquote(long, errors="strict")[:20], long.count("~"))  # whole characters of its start


TEXT = st.one_of(st.none(), st.sampled_from(["", "a", "ab", "b", "é", "学", "🦊", "\U0010ffff"]), st.text(max_size=3))
INTEGER = st.one_of(
    st.none(), st.integers(-3, 3), st.integers(-(1 << 40), 1 << 40), st.integers(-(1 << 63), (1 << 63) - 1)
)


@example([("b", 1, 1), ("a", 1, 1)], "encoded")
@example([("a", (1 << 63) - 1, 0), ("a", -(1 << 63), 0), ("a", 0, 0)], "plain")
@given(st.lists(st.tuples(TEXT, INTEGER, INTEGER), max_size=40), st.sampled_from(["plain", "encoded", "doubled"]))
def test_sort_order_is_the_stable_order_with_nulls_last(rows, form):
    """A dictionary is in order of first occurrence, and may contain each text twice."""
    text, one, other = ([row[place] for row in rows] for place in range(3))
    column = pa.array(text, pa.string()) if form == "plain" else pa.array(text, pa.string()).dictionary_encode()
    if form == "doubled":
        moved = pa.array([place % 2 * len(column.dictionary) for place in range(len(rows))], pa.int32())
        both = pa.concat_arrays([column.dictionary] * 2)
        column = pa.DictionaryArray.from_arrays(pc.add(column.indices, moved), both)
    keys = {"text": column, "one": pa.array(one, pa.int64()), "other": pa.array(other, pa.int64())}

    def plain(row: int) -> tuple:
        # UTF-8 order equals code point order: Python's comparison is the reference.
        name, *numbers = rows[row]
        return name is None, name or "", *((value is None, value or 0) for value in numbers)

    expected = sorted(range(len(rows)), key=plain)

    assert expected == sort_order(pa.table(keys), tuple(keys)).tolist()


@given(st.text(alphabet="aä学%/.", min_size=60, max_size=400), st.text(alphabet="aä学", min_size=60, max_size=400))
def test_parts_of_long_run_names_fit_into_a_file_name_and_differ(one, other):
    parts_of = {name: own_part(name) for name in (one, other)}

    assert all(len(part.encode()) <= LONGEST_PART for part in parts_of.values())
    assert len(parts_of) == len(set(parts_of.values()))
    assert all(not part.startswith(".") and "/" not in part for part in parts_of.values())


# Columns that are null in all rows of a dataset are not written, and every reader reads them as null.

START = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
NEVER = set(UNWRITTEN["samples"])


def append(writer, *rows: dict) -> None:
    usual = {"run": "", "ts": START, "ts_origin": "ingest", "target": "h:1", "metric": "m", "value": 1.0}
    put(writer, "samples", rows, **usual)


def columns(connection) -> list[set[str]]:
    return [set(pq.ParquetFile(path).schema_arrow.names) for path in map(Path, connection.files("samples"))]


def test_file_of_samples_lacks_null_columns_and_the_view_has_all(writer, connection):
    append(writer, {"value": 2.0}, {"metric": "n", "labels": "{}"})
    found = connection.query("FROM samples ORDER BY metric")

    assert [set(dataset_schema("samples").names) - NEVER] == columns(connection)
    assert dataset_schema("samples").names == found.column_names
    assert [2.0, 1.0] == found.column("value").to_pylist()
    assert all(found.column(name).null_count == 2 for name in NEVER)
    assert [(0,)] == ask(connection, "SELECT count(*) FROM samples WHERE step > 5 OR run = 'x'")
    assert check(connection.path, deep=True).is_intact


def test_sample_with_usually_null_columns_survives_a_merge(writer, connection, monkeypatch):
    monkeypatch.setattr(compaction, "SMALL_FILES", 2)
    append(writer, {"value": 2.0, "step": 7, "rank": 3, "incarnation": "i"})
    asked = "SELECT value, step, rank, incarnation FROM samples ORDER BY value"
    assert [(2.0, 7, 3, "i")] == ask(connection, asked)  # all files have all columns, as in the previous release
    append(writer, {"value": 1.0})
    append(writer, {"value": 3.0})
    expected = [(1.0, None, None, None), (2.0, 7, 3, "i"), (3.0, None, None, None)]

    assert sorted(map(len, columns(connection))) == [len(dataset_schema("samples")) - len(NEVER)] * 2 + [15]
    assert expected == ask(connection, asked)
    writer.compact()
    assert 1 == len(connection.files("samples"))
    assert expected == ask(connection, asked)


def test_delta_reader_reads_unwritten_columns_as_null(writer, connection):
    append(writer, {"value": 1.0})
    append(writer, {"value": 2.0, "step": 7})
    told = DeltaTable(str(connection.path)).to_pyarrow_dataset().to_table(columns=["value", "step", "rank"])

    assert [(1.0, None, None), (2.0, 7, None)] == sorted((r["value"], r["step"], r["rank"]) for r in told.to_pylist())


def test_run_of_samples_is_checked_against_the_log(writer, connection):
    append(writer, {"run": "a"})
    entry = entries(connection.path)[-1]
    entry.write_text(entry.read_text().replace('\\"run\\":\\"a\\"', '\\"run\\":\\"b\\"'))

    assert not check(connection.path, deep=True).is_intact


def test_rename_and_retention_work_on_files_without_null_columns(writer, connection):
    append(writer, {"run": "old", "ts": START}, {"run": "", "ts": START + dt.timedelta(days=3), "value": 5.0})
    writer.close()
    rename(connection.path, "old", "new", sync_to_disk)

    assert [("", 5.0), ("new", 1.0)] == ask(connection, "SELECT run, value FROM samples ORDER BY run")
    retain(connection.path, Retention(samples_days=1), sync_to_disk, now=START + dt.timedelta(days=3, hours=2))
    assert [("", 5.0)] == ask(connection, "SELECT run, value FROM samples")


# Rounded statistics: the largest error, the values that never change, and the record of the rounding in a store.

BITS = st.integers(FEWEST_BITS, MOST_BITS)
FLOATS = arrays(np.uint32, st.integers(1, 20), elements=st.integers(0, 2**32 - 1))  # every float32
LARGEST = 0x7F7F_FFFF


def floats(bits: np.ndarray) -> list[float]:
    return bits.view(np.float32).tolist()


@settings(max_examples=examples(200))
@given(FLOATS, BITS)
@example(np.array([LARGEST, 0x0080_0000, 0x007F_FFFF, 0x3F7F_FFFF], np.uint32), 12)
def test_rounding_error_is_at_most_half_of_the_last_kept_bit(values, kept):
    result = round_bits(values, kept)
    finite = np.isfinite(values.view(np.float32))

    assert all(
        abs(Fraction(new) - Fraction(old)) <= abs(Fraction(old)) / 2 ** (kept + 1)
        for old, new in zip(floats(values[finite]), floats(result[finite]), strict=True)
    )


@settings(max_examples=examples(200))
@given(FLOATS, BITS)
@example(np.array([LARGEST, 0x7FFF_FFFF, 0x7F80_0000, 0xFF80_0001, 0x8000_0000, 1], np.uint32), 4)
def test_rounding_keeps_nan_infinity_zero_and_subnormals_bit_for_bit(values, kept):
    result = round_bits(values, kept)
    numbers = values.view(np.float32)
    tiny = np.finfo(np.float32).tiny
    is_odd = ~np.isfinite(numbers) | (np.abs(numbers) < tiny)
    rest = result[~is_odd].view(np.float32)

    assert values[is_odd].tolist() == result[is_odd].tolist()
    assert np.isfinite(rest).all()
    assert (np.abs(rest) >= tiny).all()
    assert (values >> 31).tolist() == (result >> 31).tolist()


@settings(max_examples=examples(100))
@given(FLOATS, BITS)
def test_rounding_preserves_order_and_is_idempotent(values, kept):
    ordered = np.sort(values.view(np.float32)[~np.isnan(values.view(np.float32))])
    once = round_bits(ordered.view(np.uint32), kept)

    assert once.tolist() == round_bits(once, kept).tolist()
    assert floats(once) == sorted(floats(once))


def test_rounding_to_12_bits_clears_the_last_11_and_a_tie_is_rounded_to_even():
    values = np.random.default_rng(1).normal(0, 1, 1000).astype(np.float32).view(np.uint32)
    tie = np.array([1 + 2**-13, 1 + 3 * 2**-13], np.float32).view(np.uint32)

    assert not (round_bits(values, 12) & 0x7FF).any()
    assert [1.0, 1 + 2**-11] == floats(round_bits(tie, 12))


def statistics(values: list[float | None], *, first: int = 0) -> pa.Table:
    ops = ("norm", "min", "max", "mean", "norm_baseline", "mean_baseline")
    rows = [{"seq": seq, "step": seq} | dict.fromkeys(ops, value) for seq, value in enumerate(values, first)]
    return table("tensor_stats", rows, run="r", kind="k", tensor="t", incarnation="i", numel=2**40 + 1)


def test_statistics_are_rounded_but_not_counts_and_baselines():
    value = float(np.float32(math.pi))
    found, bits = rounded(statistics([value, None, math.nan]), "tensor_stats", 12)
    (first, second, third) = found.select(["norm", "min", "max", "mean"]).to_pylist()

    assert 12 == bits
    assert {3.1416015625} == set(first.values())
    assert {None} == set(second.values())
    assert all(math.isnan(number) for number in third.values())
    assert [value, value] == [found["norm_baseline"][0].as_py(), found["mean_baseline"][0].as_py()]
    assert 2**40 + 1 == found["numel"][0].as_py()
    piece = statistics([9.0, None, math.pi, 1.0]).slice(1, 2)  # its columns have an offset into their buffers
    assert [None, 3.1416015625] == rounded(piece, "tensor_stats", 12)[0]["norm"].to_pylist()


def test_other_datasets_are_not_rounded():
    values = pa.table({"value": [math.pi], "norm": pa.array([math.pi], pa.float32())})

    for dataset in ("scalars", "events", "hashes", "samples", "collectives"):
        assert (values, None) == rounded(values, dataset, 12), dataset


@pytest.fixture
def rounding_store(tmp_path):
    """Return a store with files from a lossless service and from one that rounds to 12 bits."""
    for first, bits, value in ((0, None, math.e), (2, 12, math.pi), (4, 16, math.pi)):
        with Store.open(tmp_path / "s", create=True, mantissa_bits=bits).claim(owner="t") as writer:
            tables = {"tensor_stats": statistics([value, value * 2], first=first)}
            writer.append(Batch(tables=tables, watermarks={"i": first + 1}))
    return tmp_path / "s"


def told(root) -> list[tuple[int | None, bytes | None]]:
    """Return the mantissa bits of each file of the newest version, from its name and from its metadata."""
    paths = files(root)["path"].to_pylist()
    metadata = [pq.read_metadata(root / path).metadata.get(MANTISSA_BITS_KEY.encode()) for path in paths]
    return sorted(zip(map(file_mantissa_bits, paths), metadata, strict=True), key=repr)


def test_merged_file_has_the_coarsest_mantissa_bits_and_equal_values(rounding_store, monkeypatch):
    monkeypatch.setattr(compaction, "SMALL_FILES", 2)
    asked = "SELECT seq, norm, norm_baseline FROM tensor_stats ORDER BY seq"
    before = ask(rounding_store, asked)
    (group,) = store_stats(Log.open(rounding_store, sync_to_disk), by="dataset").groups.to_pylist()

    assert ("tensor_stats", 12) == (group["dataset"], group["mantissa_bits"])
    assert [(12, b"12"), (16, b"16"), (None, None)] == told(rounding_store)
    compaction.compact(rounding_store, sync_to_disk)

    assert [(12, b"12")] == told(rounding_store)
    assert before == ask(rounding_store, asked)
    assert [float(np.float32(math.e)), 3.1416015625] == [before[row][1] for row in (0, 2)]


def test_mantissa_bits_outside_of_the_range_are_refused(tmp_path):
    for bits in (3, 23, 0, -1):
        with pytest.raises(ValueError, match="mantissa_bits must be 4 to 22"):
            Store.open(tmp_path / "s", create=True, mantissa_bits=bits)
