"""Tests of the size of event files, and of the points that they keep."""

from __future__ import annotations

import math
import random

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.properties import few

from rankscope_storage.formats.tensorboard import SIZE_RATIO, SMALL_BYTES, THINNED

STEPS, SPIKE, BROKEN = 120, 57, 90
OPS = ("norm", "min", "max", "mean", "nans", "infs", "zeros", "numel", "norm_baseline", "mean_baseline")


def read(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: {event.step: event.value for event in accumulator.Scalars(tag)} for tag in accumulator.Tags()["scalars"]
    }


def size(folder, pattern="*"):
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file())


def tensors(rows, names, steps):
    """Return rows of tensors, of which the first has a spike at one step and a NaN at another."""
    numbers = random.Random(1)
    for step in range(1, steps + 1):
        for name in names:
            norm = 100.0 if (step, name) == (SPIKE, names[0]) else round(numbers.uniform(1, 2), 2)
            nans = int((step, name) == (BROKEN, names[0]))
            values = dict.fromkeys(OPS, 0) | {"norm": norm, "norm_baseline": norm, "nans": nans, "numel": 4096}
            yield rows["tensor"](step, name, ts=None, **values)


@pytest.mark.usual(1)
@pytest.mark.parametrize(("count", "steps"), [(100, STEPS), (1_000, 24)])
def test_event_files_are_at_most_four_times_as_large_as_the_store(shelf, rows, count, steps):
    names = [f"model.layers.{place}.self_attention.weight" for place in range(count)]
    shelf.put(
        tensor_stats=list(tensors(rows, names, steps)),
        scalars=[rows["scalar"](step, step / 4) for step in range(1, steps + 1)],
    )
    target, report = shelf.export("tensorboard")
    stored = size(shelf.folder / "store")

    assert size(target) <= max(SMALL_BYTES, SIZE_RATIO * stored)
    assert count * steps + steps == report.omitted[THINNED] + sum(report.rows.values())
    found = read(target / "rank0")
    assert {step: step / 4 for step in range(1, steps + 1)} == found["loss"]
    assert {f"0:{name}/rank0/grad_reduced_norm" for name in names} <= found.keys()


def test_extremes_nan_and_ends_of_each_series_are_kept(shelf, rows):
    names = [f"model.layers.{place}.self_attention.weight" for place in range(40)]
    shelf.put(tensor_stats=list(tensors(rows, names, STEPS)))
    target, _ = shelf.export("tensorboard")
    found = read(target / "rank0")
    norms = found[f"0:{names[0]}/rank0/grad_reduced_norm"]

    assert 100.0 == norms[SPIKE]
    assert {1, STEPS, BROKEN} <= norms.keys()
    assert 1 == found[f"0:{names[0]}/rank0/grad_reduced_nans"][BROKEN]
    assert 10 <= len(norms) < STEPS


def test_long_scalars_are_thinned_too(shelf, rows):
    values = {step: math.nan if step == 777 else float(step % 100) for step in range(1, 40_001)}
    shelf.put(scalars=[rows["scalar"](step, value, ts=None) for step, value in values.items()])
    target, report = shelf.export("tensorboard")
    points = read(target / "rank0")["loss"]

    assert size(target) <= max(SMALL_BYTES, SIZE_RATIO * size(shelf.folder / "store"))
    assert math.isnan(points[777])
    assert {1, 40_000} <= points.keys()
    assert len(points) == report.rows["scalars"]


def test_all_points_are_written_on_request(shelf, rows):
    names = [f"w{place}" for place in range(40)]
    shelf.put(tensor_stats=list(tensors(rows, names, STEPS)))
    target, report = shelf.export("tensorboard", all_points=True)

    assert {} == report.omitted
    assert {STEPS} == {len(points) for points in read(target / "rank0").values()}


@pytest.mark.thorough
@pytest.mark.parametrize("processes", few(1, [2, 1]))
def test_ranges_of_steps_do_not_depend_on_memory_windows(shelf, rows, monkeypatch, processes):
    names = [f"model.layers.{place}.self_attention.weight" for place in range(40)]
    listed = list(tensors(rows, names, STEPS))
    shelf.put(tensor_stats=[row | {"rank": rank} for row in listed for rank in (0, 1)])
    whole, expected = shelf.export("tensorboard", "whole")
    if processes == 1:
        monkeypatch.setattr(
            "rankscope_storage.formats.common.selection.Selection.windows.__kwdefaults__", {"rows": 900}
        )
    again, found = shelf.export("tensorboard", "again", process_num=processes)

    assert expected.rows == found.rows
    assert read(whole / "rank1") == read(again / "rank1")
