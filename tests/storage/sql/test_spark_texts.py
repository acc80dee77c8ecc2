"""Texts for Spark: they have no construct of DuckDB, and calls of macros become their bodies."""

import pytest
from tests.sql_texts import sql_texts

from rankscope_storage.base.errors import QueryError
from rankscope_storage.query.spark_text import COMMON_FORMS, common_form
from rankscope_storage.sql.macros import expanded, for_spark
from rankscope_storage.sql.views import MACROS, spark_statements, view_statements

VIEWS = [for_spark(one) for one in view_statements(prefix="raw_") if one.startswith("CREATE OR REPLACE VIEW")]
BODIES = [for_spark(macro.body) for macro in MACROS.values() if macro.spark_body is None]


@pytest.mark.parametrize("texts", [VIEWS, BODIES, sql_texts().values()], ids=["views", "macros", "documentation"])
def test_our_texts_have_only_forms_that_both_engines_accept(texts):
    assert len(texts) > 7
    assert [] == [(found, text) for text in texts if (found := common_form(text, ""))]


def test_spark_gets_the_same_views_without_calls_of_macros():
    made = spark_statements(prefix="raw_")

    assert len(VIEWS) == sum(one.startswith("CREATE OR REPLACE TEMPORARY VIEW") for one in made)
    assert [] == [one for one in made for name in MACROS if f"{name}(" in one.replace(f" FUNCTION {name}(", "")]


REFUSED = [
    ("SELECT count(*) FILTER (step > 1) FROM scalars", "FILTER (WHERE condition)"),
    ("SELECT labels->>'$.a' FROM scalars", "json_extract_string(x, '$.a')"),
    ("SELECT config::json FROM runs", "of the text"),
    ("SELECT step // 7, '//' FROM scalars", "intdiv(a, b)"),
    ("SELECT * FROM a ASOF JOIN b USING (ts)", "a join on a range"),
    ("SELECT arg_max(step, value) FROM scalars", "max_by()"),
    ("SELECT quantile_cont(value, 0.5) FROM scalars", "percentile_cont(q)"),
    ("SELECT list(rank ORDER BY rank) FROM scalars", "array_sort(array_agg(x))"),
    ("SELECT * EXCLUDE (run) FROM scalars", "* EXCEPT (c)"),
    ("SELECT 1 UNION ALL BY NAME SELECT 2", "UNION ALL of columns"),
    ("SELECT * FROM scalars WHERE run = $run", "the value"),
    ("SELECT time_bucket(INTERVAL 1 HOUR, ts) FROM scalars", "epoch_us(ts)"),
    ("SELECT regexp_matches(run, 'a') FROM runs", "regexp_extract"),
    ("SELECT {'a': 1}", "one column for each value"),
    ("SELECT run[1:2] FROM runs", "substring"),
    ("SUMMARIZE runs", "names of the columns"),
    ("SELECT DISTINCT ON (run) run, step FROM scalars", "QUALIFY"),
    ("SELECT * FROM scalars USING SAMPLE 10%", "TABLESAMPLE"),
    ("PIVOT scalars ON name USING max(value)", "for each column"),
]


@pytest.mark.parametrize(("text", "form"), REFUSED)
def test_refused_construct_is_reported_with_its_common_form(text, form):
    found = common_form(text, "")

    assert form in found
    assert found.count("(write ") == 1


def test_division_by_zero_is_explained_only_if_spark_reports_it():
    text = "SELECT value / 0 FROM scalars -- FROM x"

    assert "" == common_form(text, "")
    assert "nullif" in common_form(text, "[DIVIDE_BY_ZERO] Division by zero")
    assert len(COMMON_FORMS) == len({construct for _, construct, _ in COMMON_FORMS})


def test_call_of_a_macro_becomes_its_body_with_the_arguments():
    text = "SELECT 'p10(', intdiv(a, (b + 1)) FROM p10(-- p10(\n speed, y, series => (rank, ema)) WHERE x = 'a\\b'"
    found = expanded(text, MACROS)

    assert found.startswith("SELECT 'p10(', ((a) div ((b + 1))) FROM (WITH p10_rows AS (")
    assert "SELECT *, ((rank, ema)) AS p10_series, (y)::DOUBLE AS p10_y FROM" in found
    assert found.endswith("WHERE x = 'a\\\\b'")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("p10(speed)", "needs the argument y"),
        ("p10(speed, y, colour => 1)", "has the parameters source, y, series"),
        ("p10(speed, y, y => 1)", "each at most once"),
        ("p10(speed, y", "a parenthesis of the statement is not closed"),
    ],
)
def test_wrong_arguments_of_a_macro_are_refused(call, message):
    with pytest.raises(QueryError, match=message):
        expanded(f"SELECT * FROM {call}", MACROS)
