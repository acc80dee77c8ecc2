"""The table over several steps: absent entries, copies, and ownership of the buffers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rankscope_contract.model.kinds import COUNT_OPS, DEFAULT_OPS, VALUE_OPS
from rankscope_exporter.statistics import HostCopy, MeasureGroup, StatisticsTable, copy_entries, finish, torch_backend
from rankscope_exporter.statistics.table import NUMEL_ROW

CPU = torch.device("cpu")
MAX, NUMEL = VALUE_OPS.index("max"), COUNT_OPS.index("numel")


def test_all_entries_of_a_new_table_are_absent():
    finished = finish(HostCopy(StatisticsTable(3, CPU)))

    assert not finished.present.any()
    assert np.isnan(finished.values).all()
    assert (np.float32, np.int64) == (finished.values.dtype, finished.counts.dtype)


def test_absent_entry_never_has_an_older_value(compiled):
    table = StatisticsTable(2, CPU)
    group = MeasureGroup(range(2), compiled=compiled)
    group.measure([torch.ones(3), torch.ones(4)], table)
    finish(HostCopy(table))
    group.measure([torch.ones(3), None], table)
    finished = finish(HostCopy(table))

    assert [True, False] == finished.present.tolist()
    assert np.isnan(finished.values[:, 1]).all()


def test_numbers_beyond_float32_are_inf_with_numpy_errors_enabled():
    table = StatisticsTable(3, CPU)
    MeasureGroup(range(3)).measure(
        [torch.full((3,), 1e300, dtype=torch.float64), torch.full((2,), torch.nan), None], table
    )
    with np.errstate(all="raise"):
        finished = finish(HostCopy(table))

    assert [math.inf] * 4 == finished.values[[VALUE_OPS.index(op) for op in ("norm", "min", "max", "mean")], 0].tolist()
    assert np.isnan(finished.values[:, 1:]).all()


def test_pending_copy_is_not_changed_by_later_steps(compiled):
    """Three copies are pending, and are finished in a different order than they were created."""
    table = StatisticsTable(1, CPU)
    group = MeasureGroup([0], compiled=compiled)
    copies = []
    for step in range(3):
        group.measure([torch.full((5,), float(step))], table)
        copies.append(HostCopy(table))
        assert copies[-1].ready()
    group.measure([torch.full((5,), 99.0)], table)

    assert [2.0, 0.0, 1.0] == [float(finish(copies[step]).values[MAX, 0]) for step in (2, 0, 1)]


def test_finished_numbers_are_not_overwritten_by_buffer_reuse(compiled):
    table = StatisticsTable(1, CPU)
    group = MeasureGroup([0], compiled=compiled)
    results = []
    for step in range(4):
        group.measure([torch.full((step + 1,), float(step))], table)
        results.append(finish(HostCopy(table)))

    assert [0.0, 1.0, 2.0, 3.0] == [float(finished.values[MAX, 0]) for finished in results]
    assert [1, 2, 3, 4] == [int(finished.counts[NUMEL, 0]) for finished in results]


def test_any_number_of_steps_needs_two_buffers(compiled):
    table = StatisticsTable(1, CPU)
    group = MeasureGroup([0], compiled=compiled)
    addresses = set()
    for _ in range(20):
        group.measure([torch.ones(3)], table)
        addresses.add(table.buffer.data_ptr())
        finish(HostCopy(table))

    assert 2 == len(addresses)


@pytest.mark.parametrize("rows", [[2, 3, 4], [4, 2, 0], [0, 2, 3]])
def test_tensors_are_written_to_their_rows(rows, compiled):
    table = StatisticsTable(5, CPU)
    MeasureGroup(rows, compiled=compiled).measure([torch.full((n,), float(n)) for n in (1, 2, 3)], table)
    finished = finish(HostCopy(table))

    assert dict(zip(rows, (1, 2, 3), strict=True)) == {
        row: int(finished.values[MAX, row]) for row in range(5) if finished.present[row]
    }


@pytest.mark.parametrize("rows", [range(1, 3), (1, 2), [1, 2]])
def test_measure_creates_and_reuses_its_group(rows):
    table = StatisticsTable(3, CPU)
    for value in (1.0, 7.0):
        MeasureGroup(rows).measure([torch.tensor([value]), None], table)
    finished = finish(HostCopy(table))

    assert [False, True, False] == finished.present.tolist()
    assert 7.0 == float(finished.values[MAX, 1])


def test_second_measurement_keeps_entries_of_absent_tensors(compiled):
    table = StatisticsTable(2, CPU)
    group = MeasureGroup(range(2), compiled=compiled)
    group.measure([torch.tensor([1.0]), torch.tensor([2.0])], table)
    group.measure([torch.tensor([3.0]), None], table)

    assert [3.0, 2.0] == finish(HostCopy(table)).values[MAX].tolist()


@pytest.mark.parametrize(
    ("source", "target"), [(range(2), range(2, 4)), ([0, 1], [3, 2]), ([1, 0], range(2, 4)), (range(0), range(0))]
)
def test_copy_entries_copies_statistics_and_absence(source, target):
    table = StatisticsTable(4, CPU)
    MeasureGroup(range(4)).measure([torch.tensor([5.0]), None, torch.ones(3), torch.ones(3)], table)
    before = finish_without_emptying(table)
    copy_entries(table, source, target)
    after = finish(HostCopy(table))
    for left, right in zip(source, target, strict=True):
        assert bool(before.present[left]) == bool(after.present[right])
        assert np.array_equal(before.values[:, left], after.values[:, right], equal_nan=True)


def finish_without_emptying(table):
    other = StatisticsTable(table.size, CPU)
    other.buffer.copy_(table.buffer)
    return finish(HostCopy(other))


def test_tensors_may_move_grow_and_return(compiled, check):
    """Addresses are kept between steps; a wrong one would read foreign memory."""
    table = StatisticsTable(3, CPU)
    group = MeasureGroup(range(3), compiled=compiled)
    storage = torch.randn(10_000)
    story = [
        [storage[:100], storage[100:5000], None],
        [storage[:100], storage[100:5000], None],
        [storage[:4999], storage[100:300], storage],
        [storage[:100].view(torch.int32), storage[100:300].view(torch.bfloat16), storage[:0]],
        [storage.view(100, 100)[:50], storage.view(100, 100)[:, :50], None],
        [storage.view(100, 100)[:, :50], storage.view(100, 100).t(), None],
        [storage.view(100, 100).t(), storage.view(100, 100)[:, :50].t(), None],
    ]
    for tensors in story * 2:
        group.measure(tensors, table)
        finished = finish(HostCopy(table))
        for entry, tensor in enumerate(tensors):
            assert (tensor is not None) == bool(finished.present[entry])
            if tensor is not None:
                check(finished, entry, tensor, ops=DEFAULT_OPS)


def test_same_address_with_other_strides_is_detected():
    """Both views start at one address, have one size and are not contiguous; only one of them fills its memory."""
    base = torch.arange(32.0)
    dense, gaps = base[:16].view(4, 4).t(), base.view(4, 8)[:, ::2]
    assert (dense.data_ptr(), dense.numel()) == (gaps.data_ptr(), gaps.numel())
    table = StatisticsTable(1, CPU)
    group = MeasureGroup([0])
    sums = []
    for tensor in (dense, gaps, dense):
        group.measure([tensor], table)
        sums.append(float(finish(HostCopy(table)).values[MAX, 0]))

    assert [15.0, 30.0, 15.0] == sums


def test_wrong_number_of_tensors_is_rejected(compiled):
    with pytest.raises(ValueError):
        MeasureGroup(range(2), compiled=compiled).measure([torch.ones(1)], StatisticsTable(2, CPU))


def test_accelerator_formula_reads_no_result():
    """Meta tensors have no values: reading one, such as with `.item()`, would raise."""
    meta = torch.device("meta")
    table = StatisticsTable(4, meta)
    flats = [
        torch.empty(10, device=meta),
        torch.empty(5_000_000, dtype=torch.bfloat16, device=meta),
        torch.empty(0, dtype=torch.complex64, device=meta),
        torch.empty(7, dtype=torch.int64, device=meta),
    ]
    sizes = [10, 5_000_000, 3, 7]
    for zero_below in (0.0, 0.1):
        torch_backend.measure(flats, sizes, range(4), table, zero_below=zero_below)
        torch_backend.measure(flats, sizes, (3, 1, 0, 2), table, zero_below=zero_below)

    assert "meta" == table.buffer[NUMEL_ROW].device.type


def test_accelerator_formula_gives_the_same_numbers(check):
    """On a CPU the formula has a shortcut for finite chunks; without the shortcut, the numbers must be equal."""
    tensors = [torch.randn(100_000), torch.tensor([float("nan"), 1.0, -float("inf"), 0.0]), torch.empty(0)]
    for tensor in tensors:
        parts = torch_backend.masked_sums(tensor.double(), torch_backend.count_zeros(tensor.double(), 0.0))
        table = StatisticsTable(1, CPU)
        sums = torch.stack(parts[:4]).unsqueeze(1)
        counts = torch.stack([*parts[4:], torch.tensor(tensor.numel())]).unsqueeze(1)
        table.write(range(1), sums, counts)

        check(finish(HostCopy(table)), 0, tensor, ops=DEFAULT_OPS)


def test_kernel_that_becomes_ready_within_a_step_is_used_from_the_next() -> None:
    """Equal tensors of one step have bit-identical sums, although the two backends round differently."""
    ready = iter([None, print])
    table = StatisticsTable(1, torch.device("cpu"))

    assert [None, None] == [table.kernel(lambda: next(ready)) for _ in range(2)]
    table.grow(9)
    assert table.kernel(lambda: next(ready)) is None
    HostCopy(table)
    assert print is table.kernel(lambda: next(ready))
