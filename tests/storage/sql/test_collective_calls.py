"""`collective_calls`: one row for what all ranks of a group called together, against a slow reference in Python."""

from __future__ import annotations

import datetime as dt
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope_contract.diagnostics.collective_format import CallState, spans
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.sql.collective_calls import COLLECTIVE_CALLS

SECOND = 1_000_000
DAY = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def call(rank: int, seq: int, at: float, **columns: Any) -> dict[str, Any]:
    """Return a row of a call `at` seconds, read ten seconds later."""
    return {
        "run": "r", "attempt": 0, "rank": rank, "incarnation": "i", "seq": 0, "step": seq,
        "op": "all_reduce", "group": "dp", "group_id": "0", "group_size": 2, "group_ranks": "0-1", "bytes": 12,
        "dtype": "float32", "call_site": "train.py[88]", "state": "left", "backend": "gloo", "is_p2p": False,
        "collective_seq": seq, "t_start": DAY + dt.timedelta(seconds=at), "ts": DAY + dt.timedelta(seconds=at + 10),
        **columns,
    }  # fmt: skip


Calls = Callable[[list[dict[str, Any]]], dict[tuple[str, int, int], dict[str, Any]]]


def view_over(table: pa.Table) -> list[dict[str, Any]]:
    """Return the view's rows, in memory: an own store for each history would take seconds."""
    with duckdb.connect() as connection:
        connection.register("collectives", table)
        connection.execute(COLLECTIVE_CALLS)
        rows = connection.sql("FROM collective_calls ORDER BY group_id, collective_seq, nth").to_arrow_table()
    return rows.to_pylist()


@pytest.fixture(scope="module")
def calls() -> Calls:
    """Return what gives the rows of the view over rows of `collectives`, by group, number and count."""

    def made(rows: list[dict[str, Any]]) -> dict[tuple[str, int, int], dict[str, Any]]:
        found = view_over(pa.Table.from_pylist(rows, schema=dataset_schema("collectives")))
        return {(row["group_id"], row["collective_seq"], row["nth"]): row for row in found}

    return made


def test_the_view_stands_in_every_store(tmp_path):
    store = Store.open(tmp_path / "store", create=True)
    with store.claim(owner="me") as writer, connect(store.root) as connection:
        empty = connection.query("FROM collective_calls").to_pylist()
        table = pa.Table.from_pylist([call(0, 1, 1.0), call(1, 1, 1.5)], schema=dataset_schema("collectives"))
        writer.append(Batch(tables={"collectives": table}, watermarks={"i": 0}))
        found = connection.query("SELECT last_rank, spread FROM collective_calls").to_pylist()

    assert ([], [{"last_rank": 1, "spread": 0.5}]) == (empty, found)


def test_the_questions_of_the_documentation_are_answered(tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "collectives.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    store = Store.open(tmp_path / "store", create=True)
    rows = [call(0, 1, 1.0, run="my-run"), call(1, 1, 1.5, run="my-run", op="broadcast")]
    with store.claim(owner="me") as writer, connect(store.root) as connection:
        table = pa.Table.from_pylist(rows, schema=dataset_schema("collectives"))
        writer.append(Batch(tables={"collectives": table}, watermarks={"i": 0}))
        late, apart = (connection.query(question).to_pylist() for question in block.split(";")[:2])

    assert [{"last_rank": 1, "times": 1, "seconds": 0.5, "longest": 0.5}] == late
    assert [(1, "dp", 1, "all_reduce", [0, 1])] == [tuple(row.values()) for row in apart]


def standing(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("state", "ranks_entered", "ranks_missing", "ranks_waiting", "ranks_unread"))


def test_who_came_last_and_how_long_the_others_waited(calls):
    (row,) = calls([call(0, 1, 1.0), call(1, 1, 1.25)]).values()

    assert ("over", [0, 1], [], [], []) == standing(row)
    assert (0, 1, 0.25) == (row["first_rank"], row["last_rank"], row["spread"])
    assert ("dp", "all_reduce", 12, "float32", "train.py[88]", False) == tuple(
        row[name] for name in ("group", "op", "bytes", "dtype", "call_site", "is_mismatch")
    )


def test_how_far_ranks_are_is_told_in_the_words_of_a_hang(calls):
    rows = calls(
        [
            *(call(rank, 1, 1.0) for rank in (0, 1)),
            call(0, 2, 2.0, state="entered"), call(1, 2, 2.0),
            call(0, 3, 3.0, state="entered"), call(1, 3, 3.0, state="entered"),
            call(0, 4, 4.0, state="entered"), call(0, 5, 5.0, state=None), call(1, 5, 5.0),
        ]
    )  # fmt: skip

    assert (CallState.NEVER_LEFT, [0, 1], [], [0], []) == standing(rows["0", 2, 1])
    assert (CallState.ALL_IN, [0, 1], [], [0, 1], []) == standing(rows["0", 3, 1])
    assert (CallState.OVER, [0, 1], [], [], []) == standing(rows["0", 5, 1])


def test_a_rank_that_is_behind_and_was_read_since_never_entered(calls):
    rows = calls([call(0, 4, 4.0, state="entered"), call(1, 1, 30.0, group_id="other", group_ranks="1")])

    assert (CallState.NEVER_ENTERED, [0], [1], [0], []) == standing(rows["0", 4, 1])


def test_a_rank_that_was_not_read_since_is_not_said_to_have_missed_a_call(calls):
    rows = calls([call(0, 1, 1.0), call(1, 1, 1.0), call(0, 2, 50.0, state="entered")])

    assert (CallState.UNKNOWN, [0], [], [0], [1]) == standing(rows["0", 2, 1])


def test_a_rank_that_has_gone_on_was_in_a_call_without_a_row(calls):
    """Torch overwrote it before it was read."""
    rows = calls([call(0, 1, 1.0), call(0, 2, 2.0), call(1, 2, 2.0)])

    assert (CallState.OVER, [0], [], [], [1]) == standing(rows["0", 1, 1])


@pytest.mark.parametrize(
    ("other", "is_mismatch"),
    [({"op": "broadcast"}, True), ({"dtype": "int64"}, True), ({"bytes": 16}, True), ({"call_site": "x.py[1]"}, False)],
)
def test_ranks_that_called_different_things_are_marked(other, is_mismatch, calls):
    assert is_mismatch is calls([call(0, 1, 1.0), call(1, 1, 1.0, **other)])["0", 1, 1]["is_mismatch"]


def test_sizes_may_differ_where_ranks_have_different_parts(calls):
    rows = [call(0, 1, 1.0, op="gather", bytes=8), call(1, 1, 1.0, op="gather", bytes=4)]

    assert False is calls(rows)["0", 1, 1]["is_mismatch"]


def test_messages_and_rows_without_a_group_are_no_calls(calls):
    assert {} == calls([call(0, 1, 1.0, is_p2p=True), call(1, 1, 1.0, group_id=None)])


def test_calls_of_one_number_are_counted_in_their_order(calls):
    """As NCCL numbers those that are coalesced."""
    rows = [call(rank, 1, at, bytes=size) for rank in (0, 1) for at, size in ((1.0, 4), (1.5, 8))]

    assert [(1, 4, False), (2, 8, False)] == [
        (row["nth"], row["bytes"], row["is_mismatch"]) for row in calls(rows).values()
    ]


History = list[tuple[int, int, int, bool]]
"""Rank, number, when, and whether the rank is through."""

HISTORIES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 50), st.booleans()),
    min_size=1,
    max_size=12,
    unique_by=lambda item: item[:2],
)


def reference(members: range, history: History) -> dict[int, tuple[Any, ...]]:
    """Return who is where with each call, and the spread of the entries."""
    by_seq: dict[int, dict[int, tuple[int, bool]]] = defaultdict(dict)
    for rank, seq, at, left in history:
        by_seq[seq][rank] = at, left
    latest = {rank: max((seq for of, seq, _, _ in history if of == rank), default=-1) for rank in members}
    read_at = {rank: max((at + 10 for of, _, at, _ in history if of == rank), default=-1) for rank in members}
    expected = {}
    for seq, entered in by_seq.items():
        last = max(at for at, _ in entered.values())
        absent = set(members) - set(entered)
        missing = {rank for rank in absent if latest[rank] < seq and read_at[rank] > last}
        waiting = {rank for rank, (_, left) in entered.items() if not left}
        spread = last - min(at for at, _ in entered.values())
        expected[seq] = (set(entered), missing, waiting, absent - missing, float(spread))
    return expected


@settings(max_examples=6, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), HISTORIES), min_size=1, max_size=12))
def test_every_history_is_told_as_a_reference_tells_it(histories):
    """Each is a run of its own."""
    expected, rows = {}, []
    for number, (size, history) in enumerate(histories):
        made = [entry for entry in history if entry[0] < size]
        for rank, seq, at, left in made:
            state = "left" if left else "entered"
            columns = {"run": f"r{number}", "state": state, "group_ranks": spans(range(size)), "group_size": size}
            rows.append(call(rank, seq, at, **columns))
        expected |= {(f"r{number}", seq): told for seq, told in reference(range(size), made).items()}
    found = {
        (row["run"], row["collective_seq"]): (
            *(set(row[name]) for name in ("ranks_entered", "ranks_missing", "ranks_waiting", "ranks_unread")),
            row["spread"],
        )
        for row in view_over(pa.Table.from_pylist(rows, schema=dataset_schema("collectives")))
    }

    assert expected == found
