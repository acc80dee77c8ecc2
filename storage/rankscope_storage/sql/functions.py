"""Scalar functions that the views and queries use on both engines: DuckDB and Spark.

Most of them are functions of DuckDB. Spark has them under another name or not at all, so a session of Spark defines
them. The others are macros in DuckDB. A function has the same result on both engines.
"""

from __future__ import annotations

from typing import Final

from rankscope_storage.sql.macros import Macro


def _function(name: str, parameters: str, returns: str, body: str) -> str:
    return f"CREATE OR REPLACE TEMPORARY FUNCTION {name}({parameters}) RETURNS {returns} RETURN {body}"


# Python writes NaN and infinities into JSON. DuckDB reads them, and Spark reads them only as texts.
_JSON: Final = r"""CASE WHEN contains(document, 'NaN') OR contains(document, 'Infinity')
    THEN regexp_replace(document, '([:,\[]\s*)(NaN|-?Infinity)(?=\s*[,}\]])', '$1"$2"') ELSE document END"""
_VALUE: Final = f"get_json_object({_JSON}, path)"
_DOCUMENT: Final = "document STRING, path STRING"
_VARIANT: Final = f"variant_get(try_parse_json({_JSON}), path)"

_SPANS: Final = """\
coalesce(flatten(list_transform(string_split(coalesce(spans, ''), ','), lambda span:
    range(try_cast(split_part(span, '-', 1) AS INTEGER),
      coalesce(try_cast(split_part(span, '-', 2) AS INTEGER), try_cast(span AS INTEGER)) + 1)))::INTEGER[], [])"""
_SPARK_FIRST: Final = "try_cast(split_part(span, '-', 1) AS INT)"
_SPARK_LAST: Final = "coalesce(try_cast(split_part(span, '-', 2) AS INT), try_cast(span AS INT))"
_SPARK_SPANS: Final = f"""\
flatten(transform(split(coalesce(spans, ''), ','), span ->
    CASE WHEN {_SPARK_FIRST} <= {_SPARK_LAST} THEN sequence({_SPARK_FIRST}, {_SPARK_LAST})
      ELSE CAST(array() AS ARRAY<INT>) END))"""

SPARK_FUNCTIONS: Final = (
    _function("isfinite", "number DOUBLE", "BOOLEAN", "number > '-inf'::DOUBLE AND number < 'inf'::DOUBLE"),
    _function("isinf", "number DOUBLE", "BOOLEAN", "abs(number) = 'inf'::DOUBLE"),
    # DuckDB adds the milliseconds and the rest of the microseconds, which gives the last bit of its result.
    _function("epoch", "time TIMESTAMP", "DOUBLE", "unix_micros(time) div 1000 / 1e3 + unix_micros(time) % 1000 / 1e6"),
    _function("epoch_us", "time TIMESTAMP", "BIGINT", "unix_micros(time)"),
    _function("make_timestamptz", "micros BIGINT", "TIMESTAMP", "timestamp_micros(micros)"),
    _function("to_microseconds", "micros BIGINT", "INTERVAL DAY TO SECOND", "micros * INTERVAL '0.000001' SECOND"),
    _function("starts_with", "whole STRING, beginning STRING", "BOOLEAN", "startswith(whole, beginning)"),
    _function("error", "message STRING", "BIGINT", "raise_error(message)"),
    _function("array_length", "numbers ARRAY<INT>", "INT", "size(numbers)"),
    _function(
        "json_valid",
        "document STRING",
        "BOOLEAN",
        f"CASE WHEN document IS NOT NULL THEN get_json_object({_JSON}, '$') IS NOT NULL END",
    ),
    _function("json_extract_string", _DOCUMENT, "STRING", _VALUE),
    _function(
        "json_extract",
        _DOCUMENT,
        "STRING",
        f"CASE WHEN {_VALUE} IN ('NaN', 'Infinity', '-Infinity') THEN {_VALUE} ELSE "
        f"CASE schema_of_variant({_VARIANT}) WHEN 'STRING' THEN to_json({_VARIANT}) WHEN 'VOID' THEN 'null' "
        f"ELSE {_VALUE} END END",
    ),
)
"""Statements that create functions of DuckDB in a session of Spark."""


def _macro(name: str, parameters: str, duckdb: str, spark: str | None = None) -> Macro:
    return Macro(name, dict.fromkeys(parameters.split(", ")), duckdb, spark_body=spark, is_scalar=True)


SCALAR_MACROS: Final = (
    _macro("perplexity", "loss", "exp(loss::DOUBLE)"),
    _macro("intdiv", "dividend, divisor", "dividend // divisor", "dividend div divisor"),
    # The sum of BIGINT is an error in Spark if it exceeds its range. DuckDB's sum has a wider type.
    _macro("wide", "whole", "whole", "whole::DECIMAL(38, 0)"),
    # array_agg() without rows is null in DuckDB and empty in Spark.
    _macro("sorted_list", "numbers", "coalesce(list_sort(numbers), [])", "array_sort(numbers)"),
    _macro(
        "without",
        "numbers, removed",
        "list_filter(numbers, lambda number: NOT list_contains(removed, number))",
        "filter(numbers, number -> NOT array_contains(removed, number))",
    ),
    # DuckDB compares integers of 128 bits three times as fast as structs.
    _macro(
        "entry_order",
        "entered_at, number",
        "epoch_us(entered_at)::HUGEINT * 4294967296 + number",
        "(entered_at, number)",
    ),
    # DuckDB takes the first of equal numbers that it reads; a struct of both would take twice as long.
    _macro(
        "lowest_at",
        "at_place, of_number",
        "min_by(at_place, of_number)",
        "min_by(at_place, (of_number, at_place)) FILTER (WHERE of_number IS NOT NULL)",
    ),
    _macro(
        "highest_at",
        "at_place, of_number",
        "max_by(at_place, of_number)",
        "max_by(at_place, (of_number, -at_place)) FILTER (WHERE of_number IS NOT NULL)",
    ),
    _macro("spanned_ranks", "spans", _SPANS, _SPARK_SPANS),
    _macro("number_by_rank", "ranks, numbers", "map(ranks, numbers)", "map_from_arrays(ranks, numbers)"),
    _macro(
        "ranks_behind",
        "ranks, latest, read_at, call, entered_at",
        "list_filter(ranks, lambda one: coalesce(latest[one], -1) < call "
        "AND coalesce(read_at[one] > entered_at, false))::INTEGER[]",
        "filter(ranks, one -> coalesce(try_element_at(latest, one), -1) < call "
        "AND coalesce(try_element_at(read_at, one) > entered_at, false))",
    ),
)
"""Functions that neither engine has, or that it has under another name."""
