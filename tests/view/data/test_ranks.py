"""Ranks of a run: slow and silent ranks, and the step since which a rank is slow."""

from __future__ import annotations

import pytest
from tests.view.training import Size, rank_scalars, trajectory

from rankscope_view.data.ranks import rank_grid, rank_table


def test_slow_rank_computes_longer_and_a_silent_one_has_no_new_rows(opened):
    size = Size(ranks=6, layers=1, steps=360)
    rows = rank_table(opened(scalars=rank_scalars("r", size, trajectory(size))), "r").rows
    slow = [row for row in rows if row.is_slow]

    assert [4] == [row.rank for row in slow]
    assert 0.31 == pytest.approx(slow[0].against_median, abs=0.02)
    assert 336 == slow[0].slow.since
    assert [5] == [row.rank for row in rows if row.is_silent]


def test_run_without_ranks_has_an_empty_table(connection):
    found = rank_table(connection, "mamba2-370m-32k-ctx")

    assert () == found.rows
    assert 0 == rank_grid(connection, "mamba2-370m-32k-ctx", found, whole_step=False).cells.size
