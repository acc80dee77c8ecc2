"""Views and macros of tensors, hashes and collectives, compared with Python over the same rows."""

import datetime as dt
import functools
import itertools
import math
import random
import re
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.properties import examples
from tests.storage.rows import ask, put, table

from rankscope_contract.model.collective_format import spans
from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect
from rankscope_storage.sql.collective_calls import COLLECTIVE_CALLS, CallState
from rankscope_storage.sql.functions import SCALAR_MACROS
from rankscope_storage.sql.views import OPTIONAL_KEYS


def row(**columns) -> dict:
    identity = {"run": "r", "attempt": 0, "rank": 0, "incarnation": "i", "seq": 0, "step": 1}
    tensor = {"kind": "grad_reduced", "tensor": "w", "placement": "full"}
    values = {"norm": 1.0, "min": -1.0, "max": 1.0, "mean": 0.0, "nans": 0, "infs": 0, "zeros": 0, "numel": 4}
    return {**identity, **tensor, **values, **columns}


def shard_of(group: str, rank: int, **columns) -> dict:
    return row(placement="shard", shard_group=group, rank=rank, **columns)


def combined(writer, connection, rows: list[dict]) -> list[dict]:
    """Append `rows`; return all rows of `tensor_global`."""
    put(writer, "tensor_stats", rows, {"i": max(row["seq"] for row in rows)})
    return connection.query("FROM tensor_global ORDER BY ALL").to_pylist()


def statistics_of(values: np.ndarray) -> dict:
    """Return the reference: the statistics that the exporter publishes for one tensor or shard."""
    finite = values[np.isfinite(values)]
    counts = {"nans": np.isnan(values).sum(), "infs": np.isinf(values).sum(), "zeros": (values == 0).sum()}
    ops = {"norm": np.linalg.norm, "min": np.min, "max": np.max, "mean": np.mean}
    numbers = {name: float(op(finite)) if finite.size else None for name, op in ops.items()}
    return numbers | {name: int(count) for name, count in counts.items()} | {"numel": values.size}


def assert_same(expected: dict, found: dict) -> None:
    for name, value in expected.items():
        if not isinstance(value, float):
            assert value == found[name], name
        else:
            assert value == pytest.approx(found[name], rel=1e-5, abs=1e-5), name


NUMBERS = st.lists(
    st.one_of(st.floats(-1e3, 1e3, width=32), st.sampled_from([math.nan, math.inf, 0.0])), min_size=1, max_size=6
)


@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(NUMBERS, min_size=1, max_size=4), st.integers(1, 2))
def test_shards_combine_to_the_statistics_of_the_whole_tensor(tmp_path_factory, shards, copies):
    """With hybrid sharding, several groups each contain all shards."""
    rows = [
        shard_of(f"group-{copy}", copy * len(shards) + number, **statistics_of(np.array(values)))
        for copy in range(copies)
        for number, values in enumerate(shards)
    ]
    store = Store.open(tmp_path_factory.mktemp("store"), create=True)
    with store.claim(owner="me") as writer, connect(store.root) as connection:
        (found,) = combined(writer, connection, rows)

    assert len(rows) == found["parts"]
    assert_same(statistics_of(np.concatenate([np.array(shard) for shard in shards])), found)


NOTHING = {"norm": None, "min": None, "max": None, "mean": None, "nans": 4}
COMBINED = {
    "replicas count once": (
        [row(rank=rank, norm=2.0, zeros=1) for rank in range(4)],
        {"parts": 4, "norm": 2.0, "numel": 4, "zeros": 1, "placement": "full"},
    ),
    "NaN on any replica is visible": ([row(rank=0), row(rank=1, nans=2, infs=1)], {"nans": 2, "infs": 1, "numel": 4}),
    "a tensor without finite elements has no norm": (
        [shard_of("g", rank, **NOTHING) for rank in range(2)], {"norm": None, "mean": None, "nans": 8, "numel": 8},
    ),
    "complete groups are preferred, although group a is first": (
        [shard_of(group, rank, norm=3.0) for rank, group in enumerate("abbc")],
        {"parts": 4, "norm": math.sqrt(18), "numel": 8},
    ),
    "counts include every group of shards": (
        [shard_of("a", 0, infs=1), shard_of("a", 1, infs=1), shard_of("b", 2, nans=2), shard_of("b", 3, nans=2)],
        {"nans": 4, "infs": 2, "numel": 8},
    ),
    "a whole copy is not added to shards": (
        [*(shard_of("g", rank, norm=3.0, numel=2) for rank in range(2)), row(rank=2, norm=5.0, numel=4)],
        {"parts": 3, "numel": 4, "norm": math.sqrt(18)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COMBINED)
def test_shards_are_combined_and_replicas_count_once(writer, connection, case):
    rows, expected = COMBINED[case]
    (found,) = combined(writer, connection, rows)

    assert_same(expected, found)


def test_steps_kinds_tensors_heads_and_micro_steps_are_separate(writer, connection):
    keys = {"step": 2, "kind": "param_after", "tensor": "v", "index": 0, "micro_step": 0, "vpp_stage": 1, "call_seq": 3}
    variants = [{}, {"attempt": 1}, *({name: value} for name, value in keys.items())]
    found = combined(writer, connection, [row(**variant) for variant in variants])

    assert [1] * len(variants) == [one["parts"] for one in found]


@pytest.mark.parametrize("placement", ["full", "shard"])
def test_step_measured_twice_in_an_attempt_counts_with_its_last_rows(writer, connection, placement):
    made = {"placement": placement, "shard_group": "g" if placement == "shard" else None}
    told = ((4, 100.0, 3), (9, 3.0, 0), (7, 50.0, 1))
    rows = [row(**made, rank=r, seq=s, ts=10 - s, norm=norm, nans=nans) for r in range(2) for s, norm, nans in told]
    (found,) = combined(writer, connection, rows)

    whole = {"norm": math.sqrt(18), "numel": 8} if placement == "shard" else {"norm": 3.0, "numel": 4}
    assert_same({"parts": 2, "nans": 0, **whole}, found)


# `tensor_latest` and the macros of deviations.


def append(writer, rows: list[dict], watermarks: dict[str, int] | None = None) -> None:
    identity = {"run": "r", "attempt": 0, "rank": 0, "step": 1, "kind": "grad_reduced", "tensor": "w"}
    put(writer, "tensor_stats", rows, watermarks, **identity)


def latest(connection) -> list[tuple]:
    return ask(connection, "SELECT run, attempt, rank, kind, tensor, step, norm FROM tensor_latest ORDER BY ALL")


def test_tensor_latest_has_the_last_step_of_each_rank_and_kind(writer, connection):
    rows = [
        {"attempt": 0, "step": 99, "norm": 1.0},  # of an older attempt
        {"attempt": 1, "step": 10, "norm": 2.0},
        {"attempt": 1, "step": 11, "norm": 3.0},
        {"attempt": 1, "step": 9, "norm": 4.0, "rank": 1},  # a rank behind
        {"attempt": 1, "step": 10, "norm": 5.0, "kind": "exp_avg"},  # sampled less often
        {"attempt": None, "step": 3, "norm": 6.0, "rank": None, "run": "imported"},
    ]
    append(writer, rows)

    assert latest(connection) == [
        *(("imported", None, None, "grad_reduced", "w", 3, 6.0), ("r", 1, 0, "exp_avg", "w", 10, 5.0)),
        *(("r", 1, 0, "grad_reduced", "w", 11, 3.0), ("r", 1, 1, "grad_reduced", "w", 9, 4.0)),
    ]


def test_tensor_latest_has_the_last_rows_of_a_repeated_step_only(writer, connection):
    append(writer, [{"tensor": "gone", "step": 1}, {"step": 2, "ordinal": 5, "norm": 1.0}])
    append(writer, [{"step": 2, "ordinal": 6, "norm": 2.0}, {"step": 2, "ordinal": 6, "micro_step": 0, "norm": 3.0}])

    assert [2.0, 3.0] == [row[-1] for row in latest(connection)]


def test_top_deviations_are_the_largest_ratios_to_a_stored_baseline(writer, connection):
    rows = [
        {"step": step, "norm": 1.0 + step % 7, "norm_baseline": 2.0, "mean": -0.5 * (step % 5), "mean_baseline": 0.25}
        for step in range(40)
    ]
    rows += [{"step": 50, "norm": 1.0, "norm_baseline": 0.0}, {"step": 51, "norm": math.nan}]
    append(writer, [*rows, {"run": "s", "norm": 99.0}])
    pairs = [
        (abs(row[op]), row[f"{op}_baseline"]) for row in rows for op in ("norm", "mean") if f"{op}_baseline" in row
    ]
    expected = sorted((value / base if base else math.inf for value, base in pairs if value > base), reverse=True)

    assert [(ratio,) for ratio in expected[:9]] == ask(connection, "SELECT ratio FROM top_deviations('r', top := 9)")
    assert [(20,)] == ask(connection, "SELECT count(*) FROM top_deviations('r')")
    one_of_mean = "SELECT op, value FROM top_deviations('r') WHERE ratio = 8 LIMIT 1"
    assert [("mean", -2.0)] == ask(connection, one_of_mean)


def _as_sorted(norm: float) -> tuple[int, float]:
    """Return the sort key of DuckDB, in which NaN is the largest float."""
    return (1, 0.0) if math.isnan(norm) else (0, norm)


@pytest.mark.usual(2)
@pytest.mark.parametrize(
    ("absent", "width"), [((), 10), (("attempt",), 20), (("micro_step", "index"), 10), (OPTIONAL_KEYS, 20)]
)
def test_bucket_deviations_compare_a_peak_with_the_previous_mean(writer, connection, absent, width):
    """The step is the first one with the highest norm. A column without values is null, with its usual type."""
    draw = random.Random(len(absent))
    rows = [
        {name: draw.choice([None] if name in absent else [None, 0, 3]) for name in OPTIONAL_KEYS}
        | {"kind": draw.choice("gp"), "tensor": draw.choice("tu"), "step": draw.randrange(40), "norm": norm}
        for norm in (draw.choice([1.0, 2.0, 4.0, math.inf, math.nan, None]) for _ in range(3000))
    ]
    append(writer, rows[:1500])
    append(writer, rows[1500:])
    series: dict[tuple, dict[int, list]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        key = (*(row[name] for name in OPTIONAL_KEYS), row["kind"], row["tensor"])
        series[key][row["step"] // width].append((row["norm"], row["step"]))
    expected = Counter()
    for key, buckets in series.items():
        for before, number in itertools.pairwise(sorted(buckets)):
            finite = [norm for norm, _ in buckets[before] if norm is not None and math.isfinite(norm)]
            told = [(norm, step) for norm, step in buckets[number] if norm is not None]
            if not finite or not told:
                continue
            mean, highest = statistics.fmean(finite), max((norm for norm, _ in told), key=_as_sorted)
            if _as_sorted(highest) > (0, mean):
                first = min(step for norm, step in told if _as_sorted(norm) == _as_sorted(highest))
                expected[*key[:5], *key[6:], first, str(highest), round(mean, 9)] += 1
    found = connection.sql(f"FROM bucket_deviations('r', top := 9999, width := {width})")
    names = (*OPTIONAL_KEYS[:5], "kind", "tensor", "step", "norm", "norm_before")
    told = found.project(", ".join(f'"{name}"' for name in names)).fetchall()
    ratios = found.project("ratio").fetchall()

    assert expected
    assert expected == Counter((*row[:-2], str(row[-2]), round(row[-1], 9)) for row in told)
    assert [(pytest.approx(norm / before, nan_ok=True),) for *_, norm, before in told] == ratios
    assert sorted(ratios, key=lambda row: _as_sorted(row[0]), reverse=True) == ratios
    assert found.types == connection.sql("FROM query('FROM bucket_deviations(''r'')')").types


def test_tensor_latest_opens_only_files_with_its_rows(writer, connection):
    for step in range(5):
        append(writer, [{"step": step}, {"step": step, "run": "other"}])
    connection.query("FROM tensor_latest WHERE run = 'r'")

    assert 1 == len(connection._views.files["tensor_stats"])


def test_nonfinite_has_each_row_with_nan_or_infinity_once(writer, connection):
    counts = [(nans, infs) for nans in (None, 0, 2) for infs in (None, 0, 3)]
    append(writer, [{"step": step, "nans": nans, "infs": infs} for step, (nans, infs) in enumerate(counts)])

    expected = [(step, *pair) for step, pair in enumerate(counts) if {*pair} - {None, 0}]
    assert expected == ask(connection, "SELECT step, nans, infs FROM nonfinite ORDER BY step")


# The view `desync`: ranks with different hashes of equal tensors.


def fired(rule, step, **columns) -> dict:
    event = {"run": "r", "attempt": 0, "rank": 0, "incarnation": "i", "type": "anomaly", "severity": "warning"}
    return event | {"rule": rule, "step": step, "op": "score", "value": 1.0, "threshold": 0.5} | columns


CAUSES = {
    "gap": ([fired("A", step) for step in (5, 25, 46)], [("A", 5, 25, 0, None, 2), ("A", 46, 46, 0, None, 1)]),
    "exact first": (
        [fired("GradSpike", 5, kind="grad_unreduced", tensor="b"), fired("AdamBooks", 5, kind="exp_avg", tensor="a")],
        [("AdamBooks", 5, 5, 0, "a", 1), ("GradSpike", 5, 5, 0, "b", 1)],
    ),
    "first stage of several ranks": (
        [fired("AnomalyNan", 5, kind="grad_reduced", tensor="a", rank=rank) for rank in range(3)]
        + [fired("AnomalyNan", 5, kind="grad_unreduced", tensor="b", rank=1)],
        [("AnomalyNan", 5, 5, 1, "b", 4)],
    ),
    "unknown rank": (
        [fired("AnomalyNan", 5, kind="grad_reduced", tensor="a", rank=rank) for rank in range(3)],
        [("AnomalyNan", 5, 5, None, "a", 3)],
    ),
    "largest ratio": (
        [fired("ParamMovedBetween", 5, kind="param_before", tensor=tensor, value=value)
         for tensor, value in (("a", 1.0), ("b", 3.0), ("c", 2.0))],
        [("ParamMovedBetween", 5, 5, 0, "b", 3)],
    ),
    "attempts and other events": (
        [fired("A", 9), fired("A", 3, attempt=1), fired("A", 1, type="note"), fired("B", None)],
        [("A", 9, 9, 0, None, 1), ("B", None, None, 0, None, 1), ("A", 3, 3, 0, None, 1)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CAUSES)
def test_first_causes_are_rules_in_causal_order(writer, connection, case):
    events, expected = CAUSES[case]
    put(writer, "events", [event | {"seq": seq} for seq, event in enumerate(events)], {"i": len(events)})
    found = ask(connection, "SELECT rule, step, last_step, rank, tensor, firings FROM first_causes ORDER BY cause")

    assert expected == found


@pytest.fixture
def put_hashes(writer):
    """Append hashes given as (rank, step, tensor, hash); other columns by name."""

    def append(*rows, **columns) -> None:
        names = ("rank", "step", "tensor", "hash")
        listed = [dict(zip(names, row, strict=True), ordinal=place) for place, row in enumerate(rows)]
        common = {"run": "r", "attempt": 0, "kind": "param_after", "replicas": "0-2", **columns}
        put(writer, "hashes", listed, **common)

    return append


@pytest.fixture
def apart(connection):
    return functools.partial(
        ask, connection, "SELECT step, tensor, hashes, ranks, apart, majority FROM desync ORDER BY ALL"
    )


def test_ranks_that_differ_from_the_majority_are_named(put_hashes, apart):
    put_hashes((0, 5, "a", 7), (1, 5, "a", -8), (2, 5, "a", 7), (0, 5, "b", 1), (1, 5, "b", 1), (2, 5, "b", 1))

    assert [(5, "a", 2, 3, [1], 7)] == apart()


@pytest.mark.parametrize("hashes", [(7, 8), (7, 8, 9), (7, 7, 8, 8)])
def test_without_a_majority_all_ranks_are_named(put_hashes, apart, hashes):
    put_hashes(*((rank, 5, "a", hash_) for rank, hash_ in enumerate(hashes)))

    assert [(5, "a", len(set(hashes)), len(hashes), list(range(len(hashes))), None)] == apart()


def test_equal_hashes_of_replicas_give_no_row(put_hashes, apart):
    """Hybrid sharding: ranks 0 and 2 have one shard, 1 and 3 the other. A repeated step counts with its last hashes."""
    put_hashes(*((rank, step, tensor, 7) for rank in range(3) for step in (1, 2) for tensor in "bc"))
    put_hashes((0, 1, "a", 7), (2, 1, "a", 7), replicas="0,2")
    put_hashes((1, 1, "a", 9), (3, 1, "a", 9), replicas="1,3")
    put_hashes((0, 1, "a", 5), (2, 1, "a", 5), replicas="0,2", attempt=1)  # another training
    put_hashes((0, 1, "d", 7), (1, 1, "d", 8), (0, 1, "d", 9), (1, 1, "d", 9))

    assert [] == apart()


def test_norms_have_the_range_over_the_ranks(put_hashes, connection):
    put_hashes((0, 1, "a", 7), norm=2.0)
    put_hashes((1, 1, "a", 8), norm=2.5)

    assert [(2.0, 2.5)] == ask(connection, "SELECT norm_min, norm_max FROM desync")


# `collective_calls`: one row per collective of a group, compared with a slow reference in Python.

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
        for statement in (*(macro.statement() for macro in SCALAR_MACROS), COLLECTIVE_CALLS):
            connection.execute(statement)
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


History = list[tuple[int, int, int, bool]]  # Elements: rank, number, time, and whether the rank has left the call

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
