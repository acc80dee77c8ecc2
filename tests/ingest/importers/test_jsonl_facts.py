"""Tests that SQL queries of imported JSONL logs reproduce known facts about these logs."""

from __future__ import annotations

import datetime as dt
import json

import pytest

FACTS_OF = "jsonl"

LOSS = "(SELECT * FROM scalars WHERE name = 'loss' AND labels IS NULL)"
RECORDS = """(SELECT DISTINCT seq, step FROM
    (SELECT seq, step FROM scalars UNION ALL SELECT seq, step FROM events WHERE type <> 'anomaly'))"""
STEPS = f"(SELECT seq, step, lag(step) OVER (ORDER BY seq) AS before FROM {RECORDS})"
FINITE = "FILTER (isfinite(value))"
THROUGHPUT = "FROM scalars WHERE name = 'samples_per_second'"


def about(key: str, kind: str = "BIGINT") -> str:
    return f"SELECT coalesce(TRY_CAST(config::JSON->'$.import'->>'$.{key}' AS {kind}), 0) FROM runs"


def last(name: str) -> str:
    return f"SELECT last(value ORDER BY seq) FROM scalars WHERE name = '{name}'"


QUERIES = {
    "lines": about("lines"),
    "blank_lines": about("blank_lines"),
    "unparsable_lines": about("unparsable_lines"),
    "non_object_lines": about("non_object_lines"),
    "objects": f"SELECT count(*) FROM {RECORDS}",
    "with_step": f"SELECT count(step) FROM {RECORDS}",
    "first_step": f"SELECT first(step ORDER BY seq) FROM {RECORDS}",
    "last_step": f"SELECT last(step ORDER BY seq) FROM {RECORDS}",
    "max_step": f"SELECT max(step) FROM {RECORDS}",
    "distinct_steps": f"SELECT count(DISTINCT step) FROM {RECORDS}",
    "step_rewinds": f"SELECT count(*) FROM {STEPS} WHERE step < before",
    "step_repeats": f"SELECT count(*) FROM {STEPS} WHERE step = before",
    "loss_fields": f"SELECT (SELECT count(*) FROM {LOSS}) + ({about('null_values.loss')})",
    "loss_null": about("null_values.loss"),
    "loss_nonfinite": f"SELECT count(*) FROM {LOSS} WHERE NOT isfinite(value)",
    "loss_finite": f"SELECT count(*) {FINITE} FROM {LOSS}",
    "final_loss": f"SELECT last(value ORDER BY seq) {FINITE} FROM {LOSS}",
    "min_loss": f"SELECT min(value) {FINITE} FROM {LOSS}",
    "min_loss_step": f"SELECT arg_min(step, value) {FINITE} FROM {LOSS}",
    "max_loss": f"SELECT max(value) {FINITE} FROM {LOSS}",
    "max_loss_step": f"SELECT arg_max(step, value) {FINITE} FROM {LOSS}",
    "mean_loss": f"SELECT favg(value) {FINITE} FROM {LOSS}",
    "rolling20_mean_last": f"""SELECT favg(value) FROM
        (SELECT value FROM {LOSS} WHERE isfinite(value) ORDER BY seq DESC LIMIT 20)""",
    "max_grad_norm": f"SELECT max(value) {FINITE} FROM scalars WHERE name = 'grad_norm'",
    "max_grad_norm_step": f"SELECT arg_max(step, value) {FINITE} FROM scalars WHERE name = 'grad_norm'",
    "total_steps": "SELECT planned_steps FROM runs",
    "last_percentage": last("percentage"),
    "last_elapsed": last("elapsed_seconds"),
    "last_remaining": last("remaining_seconds"),
    "all_keys": "SELECT config::JSON->'$.import.keys' FROM runs",
    "throughput": f"""WITH all_of AS (SELECT value {THROUGHPUT}),
            tenth AS (SELECT quantile_cont(value, 0.1) AS p FROM all_of)
        SELECT {{'n': count(*), 'mean': round(avg(value), 6), 'p10_linear': any_value(p),
            'below_p10': count(*) FILTER (value < p), 'min': min(value), 'max': max(value)}} FROM all_of, tenth""",
    "gpu_util": """WITH means AS (SELECT seq, value FROM scalars WHERE name = 'gpu_util_mean'),
            lists AS (SELECT DISTINCT seq FROM scalars WHERE name = 'gpu_util' AND labels->>'$.gpu' IS NOT NULL)
        SELECT {'records': count(*), 'scalar_records': count(*) FILTER (seq NOT IN (FROM lists)),
            'mean_of_means': avg(value), 'min_mean': min(value)} FROM means""",
}


@pytest.mark.usual(4)
def test_every_fact_is_reproduced(logs, recorded):
    """S3-01, S3-03, S3-04, S3-08, S3-10, S3-11: counts, extremes and durations, from the store only."""
    path, expected = recorded
    logs.import_log(path)
    (found,) = logs.query("SELECT " + ", ".join(f'({QUERIES[fact]}) AS "{fact}"' for fact in expected))
    if logs.value("SELECT config::JSON->>'$.import.step' FROM runs") is not None:
        expected = expected | of_row_numbers(expected)
    if found.get("all_keys"):
        found["all_keys"] = json.loads(found["all_keys"])
    for name in {"mean_loss", "rolling20_mean_last"} & {name for name, value in found.items() if value is not None}:
        found[name] = round(found[name], 6)
    for name in ("last_elapsed", "last_remaining"):
        if found.get(name) is not None:
            found[name] = str(dt.timedelta(seconds=found[name]))

    assert rounded(expected) == rounded(found)


def of_row_numbers(facts):
    """Return the facts about the steps of a log without steps: its losses fall from the first row to the last."""
    count = facts["objects"]
    ends = {"first_step": 1, "last_step": count, "max_step": count, "max_loss_step": 1, "min_loss_step": count}
    return {name: value for name, value in ends.items() if name in facts} | {
        name: count for name in ("with_step", "distinct_steps") if name in facts
    }


def rounded(facts):
    """Return the value with nine digits, as some facts are recorded."""
    return {
        name: rounded(value)
        if isinstance(value, dict)
        else float(f"{value:.8g}")
        if isinstance(value, float)
        else value
        for name, value in facts.items()
    }
