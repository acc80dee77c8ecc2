"""Rounded statistics: the largest error, the values that never change, and the record of the rounding in a store."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.properties import examples
from tests.storage.rows import ask, files, table

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.files.encoding import FEWEST_BITS, MANTISSA_BITS_KEY, MOST_BITS, coarsest, round_bits, rounded
from rankscope_storage.files.sorting import file_mantissa_bits
from rankscope_storage.log.delta import Log
from rankscope_storage.maintenance import compaction
from rankscope_storage.maintenance.stats import store_stats

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


def test_coarsest_of_lossless_files_is_none():
    assert None is coarsest(["a/b-0123.parquet"])
    assert 7 == coarsest(["a/b-0123.parquet", "a/b-0123-m12.parquet", "a/b-0123-m7.parquet"])


def test_mantissa_bits_outside_of_the_range_are_refused(tmp_path):
    for bits in (3, 23, 0, -1):
        with pytest.raises(ValueError, match="mantissa_bits must be 4 to 22"):
            Store.open(tmp_path / "s", create=True, mantissa_bits=bits)
