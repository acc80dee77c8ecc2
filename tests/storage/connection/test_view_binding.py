"""Analysed statements are faster and return the same rows."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from tests.properties import few
from tests.storage.rows import ask, put

from rankscope_storage.connection import connect
from rankscope_storage.connection.view_binding import CURVE, LATEST, LOSS, SOLE_ATTEMPT_CURVE
from rankscope_storage.query import file_facts
from rankscope_storage.sql.scalar_history import LOSS_LOGGED_ONCE, LOSS_OF_SOLE_ATTEMPT

ASKED = [
    LATEST,
    "(FROM tensor_latest WHERE run IN ('s', 't') AND rank = 1)",
    "scalar_curve('r', points := 7)",
    "scalar_curve('r', of_labels := '{}')",
    "(FROM loss_curve WHERE run = 'r')",
    "bucket_deviations('r', top := 99, width := 10)",
]
TENSOR = {"kind": "grad_reduced", "tensor": "w"}
LOGGED = {"name": "loss", "value": 1.0}
ROLLED = {"run": "r", "name": "loss", "attempt": 0, "step": -100, "first_step": -99, "last_step": -60, "rows": 9}
ROLLED |= {"value_count": 9, "value_avg": 2.0, "value_nans": 0}
SHAPES = [
    ([0, 1], [None, 1], "again in another file"),
    ([None, 0], [None], "once"),
    ([3], [None], "again in a file"),
    *itertools.product([[0], [None, 0], [0, 1], [0, 1, 3]], [[None], [0, 1]], ["once", "again in a file"]),
]


@pytest.mark.parametrize(("attempts", "micro_steps", "said"), few(2, SHAPES))
def test_analysed_and_general_views_return_equal_rows(writer, connection, attempts, micro_steps, said):
    """Files with rewinds, ranks, micro-batches, nulls, NaN, labels, steps that are logged again, and then rollups."""
    draw, ordinals = random.Random(f"{attempts}{said}"), itertools.count()
    numbers = [None, math.nan, math.inf, *map(float, range(6))]
    for first in (40, 0, 41 if said == "again in another file" else -40, None):
        if first is None:
            put(writer, "scalar_rollups", [ROLLED])
        else:
            keys = itertools.product("rs", attempts, [None, 0, 1], micro_steps, range(first, first + 9), [None, "{}"])
            rows = [
                {"run": run, "attempt": attempt, "rank": rank if attempt == attempts[0] else 2, "labels": labels,
                 "micro_step": micro_step, "step": step + 5 * (attempt or 0), "ordinal": next(ordinals)}
                for run, attempt, rank, micro_step, step, labels in keys
                if draw.random() < 0.6 and (attempt == attempts[0] or rank == 0)
            ]  # fmt: skip
            again = [row | {"ordinal": next(ordinals)} for row in rows[::97]] if said == "again in a file" else []
            others = [{"step": 1, "name": "lr"}, {"step": None}, {"attempt": 7, "step": 99, "value": None}]
            put(writer, "scalars", [row | {"value": draw.choice(numbers)} for row in rows + again], run="r", **LOGGED)
            put(writer, "scalars", others, run="r", **LOGGED)
            kinds = [{"kind": draw.choice(["k", "exp_avg"]), "tensor": draw.choice("wx")} for _ in rows + again]
            tensors = [row | own | {"norm": draw.choice(numbers)} for row, own in zip(rows + again, kinds, strict=True)]
            put(writer, "tensor_stats", tensors + [row | {"step": None} for row in tensors[:3]])
        for asked in ASKED if first != 0 else ():
            in_a_text = asked.replace("'", "''")
            plain = connection.sql(f"FROM query('FROM {in_a_text}') ORDER BY ALL")
            sooner = connection.sql(f"FROM {asked} ORDER BY ALL")

            assert repr(plain.fetchall()) == repr(sooner.fetchall()), (asked, first)
            assert (plain.columns, plain.types) == (sooner.columns, sooner.types)


def losses(*steps: int | None, **columns) -> list[dict]:
    return [{"run": "r", "attempt": 0, "rank": 0, **LOGGED, "step": step, **columns} for step in steps]


ONCE, SOLE = LOSS_LOGGED_ONCE, LOSS_OF_SOLE_ATTEMPT
CHEAPER = {
    "one file": ([losses(1, 2)], SOLE),
    "null attempts count as 0": ([losses(1), losses(2, attempt=None)], SOLE),
    "two attempts": ([losses(1, 2), losses(2, attempt=1)], ONCE),
    "a later attempt": ([losses(1, attempt=3)], ONCE),
    "again in a file": ([losses(1, 2, 1)], None),
    "again as a null attempt": ([losses(1) + losses(1, attempt=None)], None),
    "again in another file": ([losses(1, 2), losses(2, 3), losses(9)], None),
    "within the range of another file": ([losses(0, 100), losses(10, 20), losses(200, 300)], None),
    "beside the ranges of other files": ([losses(0, 100), losses(200, 300), losses(101, 199)], SOLE),
    "in any order of files": ([losses(9), losses(5), losses(1), losses(5)], None),
    "of two ranks, micro-batches and labels": (
        [losses(1) + losses(1, rank=1) + losses(1, labels="{}") + losses(1, micro_step=0)], SOLE,
    ),
    "rows that are no losses": ([losses(1, None, None) + losses(1, name="lr") + losses(1, value=None)], SOLE),
    "another run": ([losses(1), losses(1, 1, run="s", attempt=1)], SOLE),
}  # fmt: skip


@pytest.mark.parametrize("case", CHEAPER)
def test_loss_curve_is_cheaper_if_no_rank_logged_a_step_again(writer, connection, monkeypatch, case):
    """The facts of many files are found in several queries."""
    monkeypatch.setattr(file_facts, "_BATCH_FILES", 2)
    rows, expected = CHEAPER[case]
    for some in rows:
        put(writer, "scalars", some)
    found = ask(connection, "SELECT DISTINCT step FROM loss_curve WHERE run = 'r' ORDER BY ALL")
    made_of = connection._views.instance.defined[LOSS]

    assert found
    assert expected == (made_of if made_of in {ONCE, SOLE} else None)


@pytest.mark.parametrize("attempts", [[0], [1], [0, None], [0, 1], [None], []])
def test_shorter_curve_is_used_if_all_files_are_of_attempt_0(writer, connection, attempts):
    steps = [{"attempt": attempt, "step": 1} for attempt in attempts] or [{"run": "s", "attempt": 3, "step": 1}]
    put(writer, "scalars", steps, run="r", **LOGGED)
    ask(connection, "FROM scalar_curve('r')")

    assert (connection._views.instance.defined[CURVE] == SOLE_ATTEMPT_CURVE) == (attempts in ([0], [0, None]))


@pytest.mark.parametrize("statement", ["SHOW TABLES", "SELECT count(*) FROM duckdb_views()", "DESCRIBE scalars"])
def test_statements_that_list_views_read_no_rows(writer, connection, monkeypatch, statement):
    put(writer, "tensor_stats", [{"rank": 0, "step": 1}], run="r", **TENSOR)
    looked = []
    monkeypatch.setattr(file_facts.FileFact, "of", lambda *arguments: looked.append(arguments))
    with connect(connection.path) as fresh:
        assert fresh.sql(statement).fetchall()

    assert [] == looked
