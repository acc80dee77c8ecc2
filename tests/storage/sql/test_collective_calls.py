"""`collective_calls`: one row per collective of a group, compared with a slow reference in Python."""

from __future__ import annotations

import datetime as dt
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.storage.rows import ask, put, table

from rankscope_contract.diagnostics.collective_format import CallState, spans
from rankscope_storage.sql.collective_calls import COLLECTIVE_CALLS

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


def view_over(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the view from memory, because a separate store per history would take seconds."""
    with duckdb.connect() as connection:
        connection.register("collectives", table("collectives", rows))
        connection.execute(COLLECTIVE_CALLS)
        found = connection.sql("FROM collective_calls ORDER BY group_id, collective_seq, nth").to_arrow_table()
    return found.to_pylist()


def calls(rows: list[dict[str, Any]]) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Return the rows of the view for rows of `collectives`, by group and number."""
    return {(row["group_id"], row["collective_seq"], row["nth"]): row for row in view_over(rows)}


def test_queries_of_the_documentation_return_rows_in_every_store(writer, connection):
    text = (Path(__file__).parents[3] / "docs" / "collectives.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    empty = ask(connection, "FROM collective_calls")
    rows = [call(0, 1, 1.0, run="my-run"), call(1, 1, 1.5, run="my-run", op="broadcast")]
    put(writer, "collectives", rows, {"i": 0})
    late, apart = (connection.query(question).to_pylist() for question in block.split(";")[:2])

    assert [{"last_rank": 1, "times": 1, "seconds": 0.5, "longest": 0.5}] == late
    assert [(1, "dp", 1, "all_reduce", [0, 1])] == [tuple(row.values()) for row in apart]
    assert ([], [(1, 0.5)]) == (empty, ask(connection, "SELECT last_rank, spread FROM collective_calls"))


def standing(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("state", "ranks_entered", "ranks_missing", "ranks_waiting", "ranks_unread"))


def test_last_rank_and_waiting_time_of_the_others():
    (row,) = calls([call(0, 1, 1.0), call(1, 1, 1.25)]).values()

    assert ("over", [0, 1], [], [], []) == standing(row)
    assert (0, 1, 0.25) == (row["first_rank"], row["last_rank"], row["spread"])
    assert ("dp", "all_reduce", 12, "float32", "train.py[88]", False) == tuple(
        row[name] for name in ("group", "op", "bytes", "dtype", "call_site", "is_mismatch")
    )


OTHER = {"group_id": "other", "group_ranks": "1"}
STATES = {
    "never left": ([call(0, 1, 1.0, state="entered"), call(1, 1, 1.0)], (CallState.NEVER_LEFT, [0, 1], [], [0], [])),
    "all in": ([call(rank, 1, 3.0, state="entered") for rank in (0, 1)], (CallState.ALL_IN, [0, 1], [], [0, 1], [])),
    "over": ([call(0, 1, 5.0, state=None), call(1, 1, 5.0)], (CallState.OVER, [0, 1], [], [], [])),
    "a rank behind was read after the call": (
        [call(0, 1, 4.0, state="entered"), call(1, 0, 30.0, **OTHER)], (CallState.NEVER_ENTERED, [0], [1], [0], []),
    ),
    "a rank was not read after the call": (
        [call(0, 0, 1.0), call(1, 0, 1.0), call(0, 1, 50.0, state="entered")], (CallState.UNKNOWN, [0], [], [0], [1]),
    ),
    "PyTorch overwrote the row of a rank ahead": (
        [call(0, 1, 1.0), call(0, 2, 2.0), call(1, 2, 2.0)], (CallState.OVER, [0], [], [], [1]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_states_of_calls_have_the_names_of_hang_reports(case):
    rows, expected = STATES[case]

    assert expected == standing(calls(rows)["0", 1, 1])


def test_calls_with_different_ops_are_marked_as_mismatch():
    """Sizes may differ for uneven ops."""
    others = [{"op": "broadcast"}, {"dtype": "int64"}, {"bytes": 16}, {"call_site": "x.py[1]"}]
    rows = [call(rank, seq, 1.0, **other) for seq, one in enumerate(others) for rank, other in enumerate(({}, one))]
    rows += [call(rank, 4, 1.0, op="gather", bytes=size) for rank, size in enumerate((8, 4))]

    assert [True, True, True, False, False] == [row["is_mismatch"] for row in calls(rows).values()]


def test_p2p_and_rows_without_a_group_are_no_calls():
    assert {} == calls([call(0, 1, 1.0, is_p2p=True), call(1, 1, 1.0, group_id=None)])


def test_calls_with_one_number_are_counted_in_order():
    """NCCL gives coalesced calls one number."""
    rows = [call(rank, 1, at, bytes=size) for rank in (0, 1) for at, size in ((1.0, 4), (1.5, 8))]
    found = [(row["nth"], row["bytes"], row["is_mismatch"]) for row in calls(rows).values()]

    assert [(1, 4, False), (2, 8, False)] == found


History = list[tuple[int, int, int, bool]]
"""Elements: rank, number, time, and whether the rank has left the call."""

HISTORIES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 50), st.booleans()),
    min_size=1, max_size=12, unique_by=lambda item: item[:2],
)  # fmt: skip


def reference(members: range, history: History) -> dict[int, tuple[Any, ...]]:
    """Return the state of each rank in each call, and the spread of the entry times."""
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
def test_view_equals_the_reference_for_every_history(histories):
    """Each history is a separate run."""
    expected, rows = {}, []
    for number, (size, history) in enumerate(histories):
        made = [entry for entry in history if entry[0] < size]
        for rank, seq, at, left in made:
            state = "left" if left else "entered"
            columns = {"run": f"r{number}", "state": state, "group_ranks": spans(range(size)), "group_size": size}
            rows.append(call(rank, seq, at, **columns))
        expected |= {(f"r{number}", seq): told for seq, told in reference(range(size), made).items()}
    names = ("ranks_entered", "ranks_missing", "ranks_waiting", "ranks_unread")
    found = {
        (row["run"], row["collective_seq"]): (*(set(row[name]) for name in names), row["spread"])
        for row in view_over(rows)
    }

    assert expected == found
