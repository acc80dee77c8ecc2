"""Tests of the size of event files, and of the points that they keep."""

from __future__ import annotations

import math
import random

import pytest
from tests.properties import few
from tests.storage.formats.conftest import read_events, scalar, tensor

from rankscope_storage.formats.tensorboard import SIZE_RATIO, SMALL_BYTES, THINNED

STEPS, SPIKE, BROKEN = 120, 57, 90
OPS = ("norm", "min", "max", "mean", "nans", "infs", "zeros", "numel", "norm_baseline", "mean_baseline")
NAMES = [f"model.layers.{place}.self_attention.weight" for place in range(1_000)]


def read(folder):
    return {tag: dict(points) for tag, points in read_events(folder / "rank0").items()}


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tensors(count, steps=STEPS):
    """Return rows of tensors, of which the first has a spike at one step and a NaN at another."""
    numbers, rows = random.Random(1), []
    for step in range(1, steps + 1):
        for name in NAMES[:count]:
            norm = 100.0 if (step, name) == (SPIKE, NAMES[0]) else round(numbers.uniform(1, 2), 2)
            values = dict.fromkeys(OPS, 0) | {"norm": norm, "norm_baseline": norm, "numel": 4096}
            rows.append(tensor(step, name, ts=None, **values | {"nans": int((step, name) == (BROKEN, NAMES[0]))}))
    return rows


@pytest.mark.usual(1)
@pytest.mark.parametrize(("count", "steps"), [(100, STEPS), (1_000, 24)])
def test_event_files_are_at_most_four_times_as_large_as_the_store(shelf, count, steps):
    """The loss, and the extremes, the NaN and the ends of each series are kept."""
    shelf.put(tensor_stats=tensors(count, steps), scalars=[scalar(step, step / 4) for step in range(1, steps + 1)])
    target, report = shelf.export("tensorboard")
    found = read(target)
    norms = found[f"0:{NAMES[0]}/rank0/grad_reduced_norm"]

    assert size(target) <= max(SMALL_BYTES, SIZE_RATIO * size(shelf.folder / "store"))
    assert count * steps + steps == report.omitted[THINNED] + sum(report.rows.values())
    assert {step: step / 4 for step in range(1, steps + 1)} == found["loss"]
    assert {f"0:{name}/rank0/grad_reduced_norm" for name in NAMES[:count]} <= found.keys()
    if steps == STEPS:
        assert 100.0 == norms[SPIKE]
        assert {1, STEPS, BROKEN} <= norms.keys()
        assert 1 == found[f"0:{NAMES[0]}/rank0/grad_reduced_nans"][BROKEN]
        assert 10 <= len(norms) < STEPS


def test_long_scalars_are_thinned_too(shelf):
    values = {step: math.nan if step == 777 else float(step % 100) for step in range(1, 40_001)}
    shelf.put(scalars=[scalar(step, value, ts=None) for step, value in values.items()])
    target, report = shelf.export("tensorboard")
    points = read(target)["loss"]

    assert size(target) <= max(SMALL_BYTES, SIZE_RATIO * size(shelf.folder / "store"))
    assert math.isnan(points[777])
    assert {1, 40_000} <= points.keys()
    assert len(points) == report.rows["scalars"]


def test_all_points_are_written_on_request(shelf):
    shelf.put(tensor_stats=tensors(40))
    target, report = shelf.export("tensorboard", all_points=True)

    assert {} == report.omitted
    assert {STEPS} == {len(points) for points in read(target).values()}


@pytest.mark.thorough
@pytest.mark.parametrize("processes", few(1, [2, 1]))
def test_ranges_of_steps_do_not_depend_on_memory_windows(shelf, monkeypatch, processes):
    shelf.put(tensor_stats=[row | {"rank": rank} for row in tensors(40) for rank in (0, 1)])
    whole, expected = shelf.export("tensorboard", "whole")
    if processes == 1:
        windows = "rankscope_storage.formats.common.selection.Selection.windows.__kwdefaults__"
        monkeypatch.setattr(windows, {"rows": 900})
    again, found = shelf.export("tensorboard", "again", process_num=processes)

    assert expected.rows == found.rows
    assert read_events(whole / "rank1") == read_events(again / "rank1")
