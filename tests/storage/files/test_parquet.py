"""Data files: values are read back unchanged (NaN and null differ), statistics for the log, size on disk."""

from __future__ import annotations

import datetime as dt
import errno
import json
import math

import numpy as np
import pyarrow as pa
import pytest

from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import conform
from rankscope_storage.files.encoding import STAGING, discard, statistics, write_file


@pytest.fixture
def root(tmp_path):
    (tmp_path / STAGING).mkdir()
    return tmp_path


def tensor_stats(**columns) -> pa.Table:
    count = len(next(iter(columns.values())))
    required = {"run": ["r"] * count, "kind": ["k"] * count, "tensor": ["t"] * count}
    return conform(pa.table({**required, **columns}), "tensor_stats")


def test_file_gets_its_name_only_after_fsync(root):
    """The file below `_staging/` is fsynced and renamed, then all folders of its path are fsynced."""
    seen = []
    file = write_file(root, "tensor_stats", "p", tensor_stats(step=[1]), seen.append)

    assert [] == list((root / STAGING).iterdir())
    assert root / STAGING == seen.pop(1).parent
    assert [root, root, root / "dataset=tensor_stats", root / "dataset=tensor_stats" / "part=p"] == seen
    assert (root / file.path).stat().st_size == file.size_bytes


def test_discard_deletes_files_and_is_idempotent(root, monkeypatch):
    """On a disk that became read-only, the error of the write is the important one."""

    def refuse(path, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system")

    file = write_file(root, "tensor_stats", "p", tensor_stats(step=[1]), sync_to_disk)
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.unlink", refuse)
        discard(root, [file])

    assert (root / file.path).exists()
    discard(root, [file, file])
    assert not (root / file.path).exists()


def test_statistics_have_ranges_without_nulls_and_without_floats():
    moment = dt.datetime(2026, 11, 20, 1, 2, 3, 456789, tzinfo=dt.UTC)
    table = tensor_stats(
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
    table = tensor_stats(step=[1, 2], ts=pa.array([0, ts], pa.int64()).cast(pa.timestamp("us", tz="UTC")))
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
    table = tensor_stats(
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
