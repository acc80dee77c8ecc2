"""`tensor_latest` and the macros of deviations, compared with Python over the same rows."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter, defaultdict

import pytest
from tests.storage.rows import ask, put

from rankscope_storage.sql.views import OPTIONAL_KEYS


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
        ("imported", None, None, "grad_reduced", "w", 3, 6.0),
        ("r", 1, 0, "exp_avg", "w", 10, 5.0),
        ("r", 1, 0, "grad_reduced", "w", 11, 3.0),
        ("r", 1, 1, "grad_reduced", "w", 9, 4.0),
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
