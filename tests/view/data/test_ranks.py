"""Ranks of a run: slow and silent ranks, and the step since which a rank is slow."""

from __future__ import annotations

import pytest
from tests.view.training import MAIN, Size, append, rank_scalars, trajectory

from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect
from rankscope_view.data.ranks import rank_grid, rank_table


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "store"
    size = Size(ranks=6, layers=1, steps=360)
    with Store.open(folder, create=True).claim(owner="a test") as writer:
        append(writer, scalars=rank_scalars("r", size, trajectory(size)))
    with connect(folder) as opened:
        yield rank_table(opened, "r")


def test_slow_rank_is_the_one_that_computes_longer(table):
    slow = [row for row in table.rows if row.is_slow]

    assert [4] == [row.rank for row in slow]
    assert 0.31 == pytest.approx(slow[0].against_median, abs=0.02)
    assert 336 == slow[0].slow.since


def test_rank_whose_rows_end_early_is_silent(table):
    assert [5] == [row.rank for row in table.rows if row.is_silent]


def test_phases_of_a_rank_add_up_to_its_step(table):
    row = table.rows[0]

    assert sum(row.phases.values()) == pytest.approx(row.step_seconds, abs=0.1)


def test_rank_without_a_row_is_listed_as_silent(connection):
    found = rank_table(connection, MAIN)

    assert [0, 1] == [row.rank for row in found.rows]


def test_run_without_ranks_has_an_empty_table(connection):
    found = rank_table(connection, "mamba2-370m-32k-ctx")

    assert () == found.rows
    assert 0 == rank_grid(connection, "mamba2-370m-32k-ctx", found, whole_step=False).cells.size
