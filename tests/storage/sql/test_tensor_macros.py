"""`tensor_latest` and the macros of deviations, compared with Python over the same rows."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter, defaultdict

import pyarrow as pa
import pytest

from rankscope_storage.api.store import Batch
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.sql.views import OPTIONAL_KEYS, TENSOR_LATEST


def append(writer, rows: list[dict], watermarks: dict[str, int] | None = None) -> None:
    identity = {"run": "r", "attempt": 0, "rank": 0, "step": 1, "kind": "grad_reduced", "tensor": "w"}
    table = pa.Table.from_pylist([identity | row for row in rows], schema=dataset_schema("tensor_stats"))
    writer.append(Batch(tables={"tensor_stats": table}, watermarks=watermarks or {}))


def latest(connection) -> list[tuple]:
    columns = "run, attempt, rank, kind, tensor, step, norm"
    return connection.sql(f"SELECT {columns} FROM tensor_latest ORDER BY ALL").fetchall()


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
    rows += [
        {"step": 50, "norm": 1.0, "norm_baseline": 0.0},
        {"step": 51, "norm": math.nan},
        {"run": "s", "norm": 99.0},
    ]
    append(writer, rows)
    expected = sorted(
        (
            abs(row[op]) / row[f"{op}_baseline"] if row[f"{op}_baseline"] else math.inf
            for row in rows
            for op in ("norm", "mean")
            if row.get(f"{op}_baseline") is not None and abs(row[op]) > row[f"{op}_baseline"]
        ),
        reverse=True,
    )

    assert expected[:9] == [
        ratio for (ratio,) in connection.sql("SELECT ratio FROM top_deviations('r', top := 9)").fetchall()
    ]
    assert 20 == connection.sql("FROM top_deviations('r')").count("*").fetchall()[0][0]
    assert [("mean", -2.0)] == connection.sql(
        "SELECT op, value FROM top_deviations('r') WHERE ratio = 8 LIMIT 1"
    ).fetchall()


@pytest.mark.parametrize("width", [10, 50])
def test_bucket_deviations_compare_a_peak_with_the_previous_mean(writer, connection, width):
    rows = [
        {"rank": rank, "tensor": tensor, "step": step, "norm": 1.0 + ((step * 37 + rank * 11 + len(tensor)) % 101) / 10}
        for rank in range(2)
        for tensor in ("w", "bias")
        for step in range(120)
    ]
    append(writer, rows)
    buckets: dict[tuple, dict[int, list]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        buckets[row["rank"], row["tensor"]][row["step"] // width].append(row["norm"])
    expected = [
        (rank, tensor, pytest.approx(max(norms) / statistics.fmean(numbered[number - 1]), rel=1e-5))
        for (rank, tensor), numbered in buckets.items()
        for number, norms in numbered.items()
        if number and max(norms) > statistics.fmean(numbered[number - 1])
    ]
    found = connection.sql(
        f"SELECT rank, tensor, ratio FROM bucket_deviations('r', top := 99, width := {width})"
    ).fetchall()

    assert len(expected) == len(found)
    assert sorted(expected, key=lambda row: (*row[:2], row[2].expected)) == sorted(found)
    assert [ratio for *_, ratio in found] == sorted((ratio for *_, ratio in found), reverse=True)


@pytest.mark.usual(2)
@pytest.mark.parametrize("absent", [(), ("attempt",), ("micro_step", "index"), OPTIONAL_KEYS])
def test_bucket_deviations_group_by_every_key_that_has_a_value(writer, connection, absent):
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
        series[key][row["step"] // 10].append((row["norm"], row["step"]))
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
    found = connection.sql("FROM bucket_deviations('r', top := 9999, width := 10)")

    names = (*OPTIONAL_KEYS[:5], "kind", "tensor", "step", "norm", "norm_before")
    told = found.project(", ".join(f'"{name}"' for name in names)).fetchall()
    assert expected
    assert expected == Counter((*row[:-2], str(row[-2]), round(row[-1], 9)) for row in told)
    assert found.types == connection.sql("FROM query('FROM bucket_deviations(''r'')')").types


def _as_sorted(norm: float) -> tuple[int, float]:
    """Return the sort key of DuckDB, in which NaN is the largest float."""
    return (1, 0.0) if math.isnan(norm) else (0, norm)


@pytest.mark.thorough
def test_tensor_latest_by_file_facts_equals_a_full_scan(writer, connection):
    """Facts remembered per file and the selected files, compared with the view that reads all rows."""
    draw = random.Random(5)
    plain = TENSOR_LATEST.replace("tensor_latest", "by_scan")
    with connect(connection.path) as scanning:
        scanning.execute("SELECT count(*) FROM tensor_stats")
        scanning.execute(plain)
        for file in range(8):
            rows = [
                {
                    "run": draw.choice("rst"),
                    "attempt": draw.choice([None, 0, 0, 1]),
                    "rank": draw.choice([None, 0, 1, 2]),
                    "kind": draw.choice(["grad_reduced", "exp_avg"]),
                    "tensor": draw.choice("wx"),
                    "step": draw.choice([None, file, file + 1, 3]),
                    "ordinal": 100 * file + number,
                    "norm": float(number),
                }
                for number in range(6)
            ]
            append(writer, rows)
            for where in ("true", "run = 'r'", "run IN ('s', 't') AND rank = 1"):
                expected = scanning.sql(f"SELECT * FROM by_scan WHERE {where} ORDER BY ALL").fetchall()

                assert expected == connection.sql(f"FROM tensor_latest WHERE {where} ORDER BY ALL").fetchall()


def test_tensor_latest_opens_only_files_with_its_rows(writer, connection):
    for step in range(5):
        append(writer, [{"step": step}, {"step": step, "run": "other"}])
    connection.query("FROM tensor_latest WHERE run = 'r'")

    assert 1 == len(connection._views.files["tensor_stats"])


def test_nonfinite_has_each_row_with_nan_or_infinity_once(writer, connection):
    counts = [(nans, infs) for nans in (None, 0, 2) for infs in (None, 0, 3)]
    append(writer, [{"step": step, "nans": nans, "infs": infs} for step, (nans, infs) in enumerate(counts)])

    assert sorted(
        (step, *pair) for step, pair in enumerate(counts) if (pair[0] or 0) > 0 or (pair[1] or 0) > 0
    ) == sorted(connection.sql("SELECT step, nans, infs FROM nonfinite").fetchall(), key=lambda row: row[0])


def test_search_for_repeated_rows_starts_with_the_first_repetition(writer, connection):
    def row(seq: int, **changed: object) -> dict:
        return {"incarnation": "i", "seq": seq, "ordinal": seq, "step": seq, "norm": float(seq), **changed}

    seen = []
    for rows in ([row(1), row(1, tensor="x")], [row(2, micro_step=0), row(3, step=2, micro_step=1)], [row(4, step=2)],
                 [row(5, step=2)], [row(6, step=3, incarnation="j")]):  # fmt: skip
        append(writer, rows, watermarks={row["incarnation"]: row["seq"] for row in rows})
        norms = connection.sql("SELECT norm FROM tensor_latest ORDER BY ALL").fetchall()
        seen.append((connection._views.instance.facts["tensor_latest"][1], [norm for (norm,) in norms]))

    once, again = True, False
    assert [(once, [1, 1]), (once, [2, 3]), (once, [2, 3, 4]), (again, [2, 3, 5]), (once, [6])] == seen
