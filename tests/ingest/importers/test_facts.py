"""SQL queries of imported logs reproduce facts that an independent script computed, in all their digits."""

import datetime as dt
import json
from typing import Any

import pytest
from tests.ingest.importers.conftest import DATA


def recorded(folder: str) -> list[Any]:
    """Return a case with the path of each recorded log of a folder, and the facts about it."""
    facts = DATA / "FACTS.json"
    known = json.loads(facts.read_text(encoding="utf-8")) if facts.exists() else {f"{folder}/absent": {}}
    absent = pytest.mark.skipif(not (DATA / folder).is_dir(), reason=f"the recorded logs are not here ({DATA})")
    chosen = [(DATA / name, expected) for name, expected in known.items() if name.startswith(f"{folder}/")]
    return [pytest.param(*case, id=case[0].stem, marks=absent) for case in chosen]


def answers(logs: Any, queries: dict[str, str], names: Any) -> dict[str, Any]:
    (found,) = logs.query("SELECT " + ", ".join(f'({queries[name]}) AS "{name}"' for name in names))
    return found


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
FINITE_LOSS = "FILTER (isfinite(loss))"
STEPS_OF_RANK = f"(SELECT *, lag(step) OVER (PARTITION BY rank ORDER BY seq) AS before FROM {ROWS})"
LAST_TEN = f"(SELECT elapsed FROM {ROWS} ORDER BY seq DESC LIMIT 10)"
PLANNED = "(SELECT planned_steps FROM runs)"
TENTH = f"(SELECT quantile_cont(tflops, 0.1) FROM {ROWS})"


def by_rank(what: str, of: str = ROWS) -> str:
    """Return the query of a mapping from rank to `what`."""
    return f"""SELECT map_from_entries(list((coalesce(rank::VARCHAR, 'None'), v)))
        FROM (SELECT rank, {what} AS v FROM {of} GROUP BY rank)"""


OF_MEGATRON = {
    "iteration_records": f"SELECT count(*) FROM {ROWS}",
    "iteration_records_after_joining": f"SELECT count(*) FROM {ROWS}",
    "ranks_seen": f"SELECT coalesce(list_sort(list(DISTINCT rank) FILTER (rank IS NOT NULL)), []) FROM {ROWS}",
    "segments_per_rank": by_rank("count(DISTINCT attempt)"),
    "rewinds_per_rank": by_rank("count(*) FILTER (step <= before)", STEPS_OF_RANK),
    "rewind_points": by_rank("coalesce(list([before, step] ORDER BY seq) FILTER (step <= before), [])", STEPS_OF_RANK),
    "first_iteration": f"SELECT first(step ORDER BY seq) FROM {ROWS}",
    "last_iteration": f"SELECT last(step ORDER BY seq) FROM {ROWS}",
    "max_iteration": f"SELECT max(step) FROM {ROWS}",
    "distinct_iterations": f"SELECT count(DISTINCT step) FROM {ROWS}",
    "total_iterations": "SELECT planned_steps FROM runs",
    "records_without_finite_loss": f"SELECT count(*) FILTER (loss IS NULL OR NOT isfinite(loss)) FROM {ROWS}",
    "records_without_loss_field": "SELECT count(*) FROM events WHERE type = 'loss_missing'",
    "final_record_loss": f"SELECT loss FROM {ROWS} ORDER BY seq DESC LIMIT 1",
    "last_finite_loss": f"SELECT last(loss ORDER BY seq) {FINITE_LOSS} FROM {ROWS}",
    "min_loss": f"SELECT min(loss) {FINITE_LOSS} FROM {ROWS}",
    "min_loss_iteration": f"SELECT arg_min(step, loss) {FINITE_LOSS} FROM {ROWS}",
    "max_loss": f"SELECT max(loss) {FINITE_LOSS} FROM {ROWS}",
    "max_loss_iteration": f"SELECT arg_max(step, loss) {FINITE_LOSS} FROM {ROWS}",
    "mean_loss": f"SELECT favg(loss) {FINITE_LOSS} FROM {ROWS}",
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
@pytest.mark.parametrize(("path", "facts"), recorded("megatron"))
def test_facts_of_megatron_logs_are_reproduced(logs, path, facts):
    """S0-07 to S0-13: queries of the store give all results that scripts compute from such a log.

    S0-06 and contract 2: a second import of the whole file adds no row.
    """
    first, second = logs.import_log(path), logs.import_log(path)

    assert (first.records, 0) == (second.records, second.rows_stored)
    asked = {name: expected for name, expected in facts.items() if name not in PROSE}
    per_rank = asked.get("mean_elapsed_ms_per_rank", {})
    if set(per_rank.values()) == {0.0}:
        del asked["mean_elapsed_ms_per_rank"]
    if logs.value("SELECT count(*) FROM scalars") == 0:
        assert {"iteration_records": 0} == asked
        return
    values = answers(logs, OF_MEGATRON, asked)
    found = {name: as_printed(expected, values[name]) for name, expected in asked.items()}

    assert asked == found


LOSS = "(SELECT * FROM scalars WHERE name = 'loss' AND labels IS NULL)"
RECORDS_OF_LINES = """(SELECT DISTINCT seq, step FROM
    (SELECT seq, step FROM scalars UNION ALL SELECT seq, step FROM events WHERE type <> 'anomaly'))"""
STEPS_OF_LINES = f"(SELECT seq, step, lag(step) OVER (ORDER BY seq) AS before FROM {RECORDS_OF_LINES})"
FINITE = "FILTER (isfinite(value))"
THROUGHPUT = "FROM scalars WHERE name = 'samples_per_second'"


def about(key: str, kind: str = "BIGINT") -> str:
    return f"SELECT coalesce(TRY_CAST(config::JSON->'$.import'->>'$.{key}' AS {kind}), 0) FROM runs"


def last(name: str) -> str:
    return f"SELECT last(value ORDER BY seq) FROM scalars WHERE name = '{name}'"


OF_LINES = {
    "lines": about("lines"),
    "blank_lines": about("blank_lines"),
    "unparsable_lines": about("unparsable_lines"),
    "non_object_lines": about("non_object_lines"),
    "objects": f"SELECT count(*) FROM {RECORDS_OF_LINES}",
    "with_step": f"SELECT count(step) FROM {RECORDS_OF_LINES}",
    "first_step": f"SELECT first(step ORDER BY seq) FROM {RECORDS_OF_LINES}",
    "last_step": f"SELECT last(step ORDER BY seq) FROM {RECORDS_OF_LINES}",
    "max_step": f"SELECT max(step) FROM {RECORDS_OF_LINES}",
    "distinct_steps": f"SELECT count(DISTINCT step) FROM {RECORDS_OF_LINES}",
    "step_rewinds": f"SELECT count(*) FROM {STEPS_OF_LINES} WHERE step < before",
    "step_repeats": f"SELECT count(*) FROM {STEPS_OF_LINES} WHERE step = before",
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
@pytest.mark.parametrize(("path", "expected"), recorded("jsonl"))
def test_facts_of_json_lines_are_reproduced(logs, path, expected):
    """S3-01, S3-03, S3-04, S3-08, S3-10, S3-11: counts, extremes and durations, from the store only."""
    logs.import_log(path)
    found = answers(logs, OF_LINES, expected)
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


RECORDS = "(SELECT DISTINCT incarnation, seq, name FROM scalars)"
STATE = "(SELECT config::JSON->'$.trainer_state' AS state FROM runs)"
ABOUT = "(SELECT config::JSON->'$.import' AS about FROM runs)"


def of_state(key: str, kind: str = "DOUBLE") -> str:
    return f"SELECT TRY_CAST(state->>'$.{key}' AS {kind}) FROM {STATE}"


def progress(part: str, whole: str) -> str:
    return f"""SELECT round(100 * (state->>'$.{part}')::DOUBLE / nullif((state->>'$.{whole}')::DOUBLE, 0), 2)
        FROM {STATE}"""


def of_name(what: str, name: str) -> str:
    return f"SELECT {what} FROM scalars WHERE name = '{name}' AND labels IS NULL"


OF_STATES = {
    "entries": f"SELECT count(DISTINCT (incarnation, seq)) FROM {RECORDS}",
    "train_records": f"SELECT count(*) FROM {LOSS}",
    "eval_records": "SELECT count(DISTINCT seq) FROM scalars WHERE starts_with(name, 'eval_')",
    "other_records": f"""SELECT count(*) FROM (SELECT seq FROM {RECORDS} GROUP BY seq
        HAVING NOT bool_or(name = 'loss' OR starts_with(name, 'eval_')))""",
    "first_step": f"SELECT first(step ORDER BY seq) FROM {LOSS}",
    "last_step": f"SELECT last(step ORDER BY seq) FROM {LOSS}",
    "global_step": of_state("global_step", "BIGINT"),
    "max_steps": of_state("max_steps", "BIGINT"),
    "epoch": of_state("epoch"),
    "num_train_epochs": of_state("num_train_epochs", "BIGINT"),
    "step_progress_pct": progress("global_step", "max_steps"),
    "epoch_progress_pct": progress("epoch", "num_train_epochs"),
    "nonfinite_loss": f"SELECT count(*) FROM {LOSS} WHERE NOT isfinite(value)",
    "final_loss": f"SELECT last(value ORDER BY seq) {FINITE} FROM {LOSS}",
    "min_loss": f"SELECT min(value) {FINITE} FROM {LOSS}",
    "max_loss": f"SELECT max(value) {FINITE} FROM {LOSS}",
    "mean_loss": f"SELECT round(avg(value) {FINITE}, 6) FROM {LOSS}",
    "min_loss_step": f"SELECT step FROM {LOSS} WHERE isfinite(value) ORDER BY value, seq LIMIT 1",
    "perplexity_final": f"SELECT round(exp(last(value ORDER BY seq) {FINITE}), 8) FROM {LOSS}",
    "trend_seed001": f"""WITH numbered AS (SELECT value, row_number() OVER (ORDER BY seq DESC) AS age
            FROM {LOSS} WHERE isfinite(value))
        SELECT CASE WHEN avg(value) FILTER (age <= 10) < avg(value) FILTER (age BETWEEN 11 AND 20)
            THEN 'down' ELSE 'up' END FROM numbered""",
    "moving_average_window_seed001": f"SELECT least(10, count(*) // 10) FROM {LOSS}",
    "current_learning_rate": of_name("last(value ORDER BY seq)", "learning_rate"),
    "max_learning_rate": of_name("max(value)", "learning_rate"),
    "grad_norm_records": of_name("count(*)", "grad_norm"),
    "nonfinite_grad_norm": of_name("count(*) FILTER (NOT isfinite(value))", "grad_norm"),
    "current_grad_norm": of_name("last(value ORDER BY seq)", "grad_norm"),
    "max_grad_norm": of_name(f"max(value) {FINITE}", "grad_norm"),
    "max_grad_norm_step": of_name(f"arg_max(step, value) {FINITE}", "grad_norm"),
    "min_eval_loss": of_name(f"min(value) {FINITE}", "eval_loss"),
    "min_eval_loss_step": of_name(f"arg_min(step, value) {FINITE}", "eval_loss"),
    "last_eval_loss": of_name("last(value ORDER BY seq)", "eval_loss"),
    "best_metric": of_state("best_metric"),
    "best_model_checkpoint_set": f"SELECT state->>'$.best_model_checkpoint' IS NOT NULL FROM {STATE}",
    "step_rewinds": """SELECT count(*) FROM (SELECT step < lag(step) OVER (ORDER BY seq) AS back
        FROM (SELECT DISTINCT seq, step FROM scalars)) WHERE back""",
    "all_keys": f"SELECT about->'$.keys' FROM {ABOUT}",
    "finished": "SELECT state = 'completed' FROM runs",
    "summary_entry_train_loss": of_name("any_value(value)", "train_loss"),
    "unparsable_as_json": f"SELECT CASE WHEN (about->'$.cut')::BOOLEAN THEN 'JSONDecodeError' END FROM {ABOUT}",
    "complete_train_entries_before_cut": f"SELECT count(*) FROM {LOSS}",
    "last_complete_step": f"SELECT last(step ORDER BY seq) FROM {LOSS}",
}


@pytest.mark.usual(4)
@pytest.mark.parametrize(("path", "expected"), recorded("trainer_state"))
def test_facts_of_trainer_states_are_reproduced(logs, path, expected):
    """S1-09, S1-10, S1-18: values, absent values and progress, from the store only."""
    logs.import_log(path)
    found = answers(logs, OF_STATES, expected)
    if found.get("all_keys"):
        found["all_keys"] = json.loads(found["all_keys"])

    assert rounded(expected) == rounded(found)


def rounded(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the values with nine digits, as some facts are recorded."""
    shown = {dict: rounded, float: lambda value: float(f"{value:.8g}")}
    return {name: shown.get(type(value), lambda same: same)(value) for name, value in facts.items()}
