"""Tests that SQL queries of imported Megatron logs reproduce known facts about these logs.

An independent script computed the facts. It gives 0.0 as `mean_elapsed_ms_per_rank` of logs that print seconds, which
is no fact of the log. All other facts are compared in all their digits.
"""

from __future__ import annotations

from typing import Any

import pytest

FACTS_OF = "megatron"

ROWS = """(SELECT seq, any_value(rank) AS rank, any_value(attempt) AS attempt, any_value(step) AS step,
        any_value(ts) AS ts,
        max(value) FILTER (name = 'loss') AS loss,
        max(value) FILTER (name = 'grad_norm') AS grad_norm,
        1000 * max(value) FILTER (name = 'step_seconds') AS elapsed,
        max(value) FILTER (name = 'tflops_per_gpu') AS tflops,
        max(value) FILTER (name = 'samples_total') AS samples,
        max(value) FILTER (name = 'skipped_iterations') AS skipped,
        max(value) FILTER (name = 'nan_iterations') AS nans
    FROM scalars GROUP BY seq HAVING count(*) FILTER (name = 'step_seconds') > 0)"""
FINITE = "FILTER (isfinite(loss))"
STEPS = f"(SELECT *, lag(step) OVER (PARTITION BY rank ORDER BY seq) AS before FROM {ROWS})"
LAST_TEN = f"(SELECT elapsed FROM {ROWS} ORDER BY seq DESC LIMIT 10)"
PLANNED = "(SELECT planned_steps FROM runs)"
TENTH = f"(SELECT quantile_cont(tflops, 0.1) FROM {ROWS})"


def by_rank(what: str, of: str = ROWS) -> str:
    """Return the query of a mapping from rank to `what`."""
    return f"""SELECT map_from_entries(list((coalesce(rank::VARCHAR, 'None'), v)))
        FROM (SELECT rank, {what} AS v FROM {of} GROUP BY rank)"""


QUERIES = {
    "iteration_records": f"SELECT count(*) FROM {ROWS}",
    "iteration_records_after_joining": f"SELECT count(*) FROM {ROWS}",
    "ranks_seen": f"SELECT coalesce(list_sort(list(DISTINCT rank) FILTER (rank IS NOT NULL)), []) FROM {ROWS}",
    "segments_per_rank": by_rank("count(DISTINCT attempt)"),
    "rewinds_per_rank": by_rank("count(*) FILTER (step <= before)", STEPS),
    "rewind_points": by_rank("coalesce(list([before, step] ORDER BY seq) FILTER (step <= before), [])", STEPS),
    "first_iteration": f"SELECT first(step ORDER BY seq) FROM {ROWS}",
    "last_iteration": f"SELECT last(step ORDER BY seq) FROM {ROWS}",
    "max_iteration": f"SELECT max(step) FROM {ROWS}",
    "distinct_iterations": f"SELECT count(DISTINCT step) FROM {ROWS}",
    "total_iterations": "SELECT planned_steps FROM runs",
    "records_without_finite_loss": f"SELECT count(*) FILTER (loss IS NULL OR NOT isfinite(loss)) FROM {ROWS}",
    "records_without_loss_field": "SELECT count(*) FROM events WHERE type = 'loss_missing'",
    "final_record_loss": f"SELECT loss FROM {ROWS} ORDER BY seq DESC LIMIT 1",
    "last_finite_loss": f"SELECT last(loss ORDER BY seq) {FINITE} FROM {ROWS}",
    "min_loss": f"SELECT min(loss) {FINITE} FROM {ROWS}",
    "min_loss_iteration": f"SELECT arg_min(step, loss) {FINITE} FROM {ROWS}",
    "max_loss": f"SELECT max(loss) {FINITE} FROM {ROWS}",
    "max_loss_iteration": f"SELECT arg_max(step, loss) {FINITE} FROM {ROWS}",
    "mean_loss": f"SELECT favg(loss) {FINITE} FROM {ROWS}",
    "nonfinite_or_missing_grad_norm": f"""SELECT count(*) FILTER (grad_norm IS NULL OR NOT isfinite(grad_norm))
        FROM {ROWS}""",
    "max_grad_norm": f"SELECT max(grad_norm) FILTER (isfinite(grad_norm)) FROM {ROWS}",
    "max_grad_norm_iteration": f"""SELECT last(step ORDER BY seq) FROM {ROWS} WHERE grad_norm =
        (SELECT max(grad_norm) FILTER (isfinite(grad_norm)) FROM {ROWS})""",
    "sum_skipped_iterations": f"SELECT sum(skipped) FROM {ROWS}",
    "sum_nan_iterations": f"SELECT sum(nans) FROM {ROWS}",
    "elapsed_ms_mean": f"SELECT favg(elapsed) FROM {ROWS}",
    "elapsed_ms_median": f"SELECT median(elapsed) FROM {ROWS}",
    "elapsed_ms_max": f"SELECT max(elapsed) FROM {ROWS}",
    "elapsed_ms_first": f"SELECT first(elapsed ORDER BY seq) FROM {ROWS}",
    "elapsed_ms_last": f"SELECT last(elapsed ORDER BY seq) FROM {ROWS}",
    "elapsed_ms_mean_last10": f"SELECT favg(elapsed) FROM {LAST_TEN}",
    "seed000_slow_rule_last_gt_2x_mean_of_previous": f"""SELECT coalesce(
            any_value(elapsed) FILTER (place = 1) > 2 * favg(elapsed) FILTER (place > 1), false)
        FROM (SELECT elapsed, row_number() OVER (ORDER BY seq DESC) AS place FROM {ROWS})""",
    "seed000_stuck_threshold_s": f"SELECT 3 * last(elapsed ORDER BY seq) / 1000 FROM {ROWS}",
    "eta_s_from_mean_last10": f"""SELECT favg(elapsed) / 1000 *
        ({PLANNED} - (SELECT last(step ORDER BY seq) FROM {ROWS})) FROM {LAST_TEN}""",
    "records_elapsed_gt_2x_median": f"""SELECT count(*) FROM {ROWS}
        WHERE elapsed > 2 * (SELECT median(elapsed) FROM {ROWS})""",
    "first_timestamp": f"SELECT first(ts ORDER BY seq) FROM {ROWS}",
    "last_timestamp": f"SELECT last(ts ORDER BY seq) FROM {ROWS}",
    "consumed_samples_last": f"SELECT last(samples ORDER BY seq) FROM {ROWS}",
    "validation_points": "SELECT count(*) FROM scalars WHERE name = 'eval_loss'",
    "validation_last": "SELECT [step, value] FROM scalars WHERE name = 'eval_loss' ORDER BY seq DESC LIMIT 1",
    "tflops_mean": f"SELECT favg(tflops) FROM {ROWS}",
    "tflops_p10_linear": f"SELECT {TENTH}",
    "tflops_below_p10": f"SELECT count(*) FROM {ROWS} WHERE tflops < {TENTH}",
    "tflops_first": f"SELECT first(tflops ORDER BY seq) FROM {ROWS}",
    "tflops_last": f"SELECT last(tflops ORDER BY seq) FROM {ROWS}",
    "last_iteration_per_rank": by_rank("last(step ORDER BY seq)"),
    "mean_elapsed_ms_per_rank": by_rank("favg(elapsed)"),
}
PROSE = {"note"}


def as_printed(expected: Any, found: Any) -> Any:
    """Return `found` in the form and with the digits of `expected`."""
    if isinstance(expected, dict):
        return {key: as_printed(expected.get(key), value) for key, value in dict(found).items()}
    if isinstance(expected, list):
        return [as_printed(e, f) for e, f in zip(expected, found, strict=True)]
    if isinstance(expected, str):
        shown = found.strftime("%Y-%m-%d %H:%M:%S.%f")
        return shown if "." in expected else shown.removesuffix(".000000")
    if isinstance(expected, float) and found is not None:
        digits = len(repr(expected).partition(".")[2])
        return expected if abs(found - expected) <= 0.5000001 * 10.0**-digits else found
    return found


@pytest.mark.usual(3)
def test_every_recorded_fact_is_reproduced_by_a_query(recorded, logs):
    """S0-07 to S0-13: queries of the store give all results that scripts compute from such a log.

    S0-06 and contract 2: a second import of the whole file adds no row.
    """
    path, facts = recorded
    first, second = logs.import_log(path), logs.import_log(path)

    assert (first.records, 0) == (second.records, second.rows_stored)
    asked = {name: expected for name, expected in facts.items() if name not in PROSE}
    per_rank = asked.get("mean_elapsed_ms_per_rank", {})
    if set(per_rank.values()) == {0.0}:
        del asked["mean_elapsed_ms_per_rank"]
    if logs.value("SELECT count(*) FROM scalars") == 0:
        assert {"iteration_records": 0} == asked
        return
    (values,) = logs.query("SELECT " + ", ".join(f'({QUERIES[name]}) AS "{name}"' for name in asked))
    found = {name: as_printed(expected, values[name]) for name, expected in asked.items()}

    assert asked == found
