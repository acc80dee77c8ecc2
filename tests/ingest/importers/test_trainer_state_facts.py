"""Tests that SQL queries of imported trainer states reproduce known facts about these states."""

from __future__ import annotations

import json

import pytest

FACTS_OF = "trainer_state"

LOSS = "(SELECT * FROM scalars WHERE name = 'loss' AND labels IS NULL)"
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


FINITE = "FILTER (isfinite(value))"

QUERIES = {
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
def test_every_fact_is_reproduced(logs, recorded):
    """S1-09, S1-10, S1-18: values, absent values and progress, from the store only."""
    path, expected = recorded
    logs.import_log(path)
    (found,) = logs.query("SELECT " + ", ".join(f'({QUERIES[fact]}) AS "{fact}"' for fact in expected))
    if found.get("all_keys"):
        found["all_keys"] = json.loads(found["all_keys"])

    assert rounded(expected) == rounded(found)


def rounded(facts):
    """Return the value with nine digits, as some facts are recorded."""
    return {name: float(f"{value:.8g}") if isinstance(value, float) else value for name, value in facts.items()}
