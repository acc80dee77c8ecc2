"""Column scans: row groups are skipped by their statistics, constant columns are known, and names are dictionaries."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankscope_storage.query.column_scan import row_groups


@pytest.fixture
def paths(tmp_path):
    """Return two files of two row groups each: names a, b and c, d; the last group has NaN counts and no rank."""
    found = []
    for number, names in enumerate((["a", "a", "b", "b"], ["c", "c", "d", "d"])):
        table = pa.table(
            {
                "run": ["r"] * 4,
                "tensor": names,
                "kind": ["k"] * 4,
                "rank": pa.array([0, 0, 0, None if number else 0], pa.int32()),
                "step": list(range(4)),
                "nans": [0, 0, 0, 3 if number else 0],
                "infs": pa.nulls(4, pa.int64()),
            }
        )
        found.append(str(tmp_path / f"{number}.parquet"))
        pq.write_table(table, found[-1], row_group_size=2)
    return found


def test_row_groups_without_the_values_are_skipped(paths):
    found = row_groups(paths, "tensor_stats", {"run": ["r"], "tensor": ["b", "d"]})
    batches = list(found.batches(["tensor", "step"]))

    assert ["b", "b", "d", "d"] == [name for batch in batches for name in batch.column("tensor").to_pylist()]
    assert pa.types.is_dictionary(batches[0].schema.field("tensor").type)
    assert 4 == found.rows
    assert 0 == row_groups(paths, "tensor_stats", {"run": ["other"]}).rows


def test_row_groups_are_divided_by_their_statistics(paths):
    """Counts above zero are apart, adjacent groups with equal constants together, and so are groups of one value."""
    finite, others = row_groups(paths, "tensor_stats", {}, ("nans", "infs")).split(("nans", "infs"))
    stretches = row_groups(paths, "tensor_stats", {}, ("run", "rank")).stretches(("run", "rank"))
    constant, rest = row_groups(paths, "tensor_stats", {"run": ["r"]}, ("rank",)).split_constant(("run", "rank"))

    assert (6, 2) == (finite.rows, others.rows)
    assert [({"run": "r", "rank": 0}, 6), ({"run": "r"}, 2)] == [(values, groups.rows) for values, groups in stretches]
    assert (6, 2) == (constant.rows, rest.rows)
    assert [2, 2, 2] == [group.rows for group in constant.each()]


def test_constant_and_absent_columns_are_known(paths):
    first = row_groups(paths[:1], "tensor_stats", {}, ("rank", "step", "infs", "attempt"))
    (batch, *_) = row_groups(paths, "tensor_stats", {"tensor": ["a"]}).batches(["attempt", "step"])

    assert {"rank": 0, "infs": None, "attempt": None} == first.constants(("rank", "step", "infs", "attempt"))
    assert {} == row_groups(paths, "tensor_stats", {}, ("rank",)).constants(("rank",))  # one rank is null
    assert [None, None] == batch.column("attempt").to_pylist()  # the files lack the column
