"""Partitions and sort orders, compared with simple reference implementations."""

from __future__ import annotations

import datetime as dt
from urllib.parse import unquote

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rankscope_storage.files.sorting import (
    LONGEST_PART,
    OWN_PART_ROWS,
    is_sorted,
    own_part,
    parts,
    sort_order,
)

TODAY = dt.date(2026, 11, 20)


def test_run_with_100000_rows_gets_a_separate_part():
    """A dictionary may contain its name twice."""
    names = ["big"] * OWN_PART_ROWS + ["small"] * (OWN_PART_ROWS - 1) + ["tiny"]
    twice = pa.DictionaryArray.from_arrays(pa.array([0, 1] * (OWN_PART_ROWS // 2)), pa.array(["r", "r"]))
    found = {part: rows.num_rows for part, rows in parts(pa.table({"run": names}), "scalars", TODAY)}

    assert {"big": OWN_PART_ROWS, "_shared-2026-11-20": OWN_PART_ROWS} == found
    assert ["r"] == [part for part, _ in parts(pa.table({"run": twice}), "scalars", TODAY)]


@given(st.lists(st.sampled_from(["a", "b/c", "学", ""]), max_size=30), st.booleans())
def test_parts_contain_every_row_exactly_once(names, encoded):
    run = pa.array(names, pa.string())
    table = pa.table({"run": run.dictionary_encode() if encoded else run, "row": list(range(len(names)))})
    found = [row for _, rows in parts(table, "events", TODAY) for row in rows["row"].to_pylist()]

    assert list(range(len(names))) == sorted(found)


def test_samples_are_partitioned_by_day_and_without_ts_by_today():
    day = 86_400_000_000
    table = pa.table({"run": ["r"] * 4, "ts": pa.array([0, day - 1, day, None], pa.timestamp("us", tz="UTC"))})

    found = {part: rows.num_rows for part, rows in parts(table, "samples", TODAY)}
    assert {"1970-01-01": 2, "1970-01-02": 1, "2026-11-20": 1} == found


def test_part_is_one_safe_folder_name_for_any_run_name():
    for name in ("a/b", "..", "a=b", 'it\'s "q"', "学习", "123", "2026-11-20", "", ".hidden", "x" * 60):
        part = own_part(name)

        assert not set(part) & set("/\\='\" ")
        assert part not in {"", ".", ".."}
        assert name == ("" if part == "%" else unquote(part))
    long = own_part("学" * 100)
    assert ("学" * 20, 1) == (unquote(long, errors="strict")[:20], long.count("~"))  # whole characters of its start


TEXT = st.one_of(st.none(), st.sampled_from(["", "a", "ab", "b", "é", "学", "🦊", "\U0010ffff"]), st.text(max_size=3))
INTEGER = st.one_of(
    st.none(), st.integers(-3, 3), st.integers(-(1 << 40), 1 << 40), st.integers(-(1 << 63), (1 << 63) - 1)
)


@given(st.lists(st.tuples(TEXT, INTEGER, INTEGER), max_size=40), st.booleans())
def test_packed_sort_order_is_the_stable_order_with_nulls_last(rows, encoded):
    text, one, other = ([row[place] for row in rows] for place in range(3))
    column = pa.array(text, pa.string())
    numbers = {"one": pa.array(one, pa.int64()), "other": pa.array(other, pa.int64())}
    table = pa.table({"text": column.dictionary_encode() if encoded else column, **numbers})

    def plain(row: int) -> tuple:
        # UTF-8 order equals code point order: Python's comparison is the reference.
        name, *numbers = rows[row]
        return name is None, name or "", *((value is None, value or 0) for value in numbers)

    assert sorted(range(len(rows)), key=plain) == sort_order(table, ("text", "one", "other")).tolist()


def test_dictionary_that_contains_a_text_twice_sorts_by_text():
    doubled = pa.DictionaryArray.from_arrays(pa.array([2, 0, 1]), pa.array(["a", "b", "a"]))
    table = pa.table({"text": doubled, "number": [1, 2, 0]})

    assert [0, 1, 2] == sort_order(table, ("text", "number")).tolist()


@given(st.text(alphabet="aä学%/.", min_size=60, max_size=400), st.text(alphabet="aä学", min_size=60, max_size=400))
def test_parts_of_long_run_names_fit_into_a_file_name_and_differ(one, other):
    parts_of = {name: own_part(name) for name in (one, other)}

    assert all(len(part.encode()) <= LONGEST_PART for part in parts_of.values())
    assert len(parts_of) == len(set(parts_of.values()))
    assert all(not part.startswith(".") and "/" not in part for part in parts_of.values())


_KEYS = ("run", "tensor", "step")


@st.composite
def _keyed_rows(draw: st.DrawFn) -> pa.Table:
    """Generate mostly sorted rows; the dictionaries are unsorted, have unused texts or contain a text twice."""
    row = st.tuples(st.sampled_from(["a", "b", None]), st.sampled_from(["x", "y"]), st.integers(0, 3) | st.none())
    rows = draw(st.lists(row, max_size=8))
    if draw(st.booleans()):
        rows.sort(key=lambda row: [(value is None, value or 0) for value in row])
    runs, tensors, steps = zip(*rows, strict=True) if rows else ((), (), ())
    names = draw(st.sampled_from([["a", "b"], ["b", "a"], ["b", "a", "a"]]))
    codes = pa.array([None if run is None else names.index(run) for run in runs], pa.int32())
    run = pa.DictionaryArray.from_arrays(codes, pa.array(names))
    tensor = pa.array(tensors, pa.string())
    tensor = tensor.dictionary_encode() if draw(st.booleans()) else tensor
    return pa.table({"run": run, "tensor": tensor, "step": pa.array(steps, pa.int64())})


@given(_keyed_rows())
def test_is_sorted_is_true_only_if_sorting_changes_nothing(table):
    leaves = list(range(table.num_rows)) == sort_order(table, _KEYS).tolist()
    run = pa.DictionaryArray.from_arrays(pa.array([1, 1, 0, 0], pa.int32()), pa.array(["b", "a"]))
    usual = pa.table({"run": run, "tensor": pa.array(["x"] * 4).dictionary_encode(), "step": [1, 2, 0, 7]})

    assert leaves or not is_sorted(table, _KEYS)
    assert is_sorted(usual, _KEYS)
