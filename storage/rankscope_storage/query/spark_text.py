"""Find the constructs in the text of a query that Spark refuses.

A construct of DuckDB that Spark refuses has a common form, which both engines accept.
"""

from __future__ import annotations

import re
from typing import Final

from rankscope_storage.sql.macros import TOKEN

COMMON_FORMS: Final = (
    (r"\bfilter\s*\((?!\s*where\b)", "FILTER (condition)", "FILTER (WHERE condition)"),
    (r":=", "name := value", "name => value"),
    (r"->", "the operators -> and ->> of JSON", "json_extract(x, '$.a') and json_extract_string(x, '$.a')"),
    (r"::\s*json\b", "::json", "json_extract_string(x, '$.a') of the text"),
    (r"::\s*varchar\b|\bas\s+varchar\s*\)", "VARCHAR", "STRING"),
    (r"\btimestamptz\b", "TIMESTAMPTZ", "TIMESTAMP"),
    (r"//", "a // b", "intdiv(a, b)"),
    (r"\basof\b", "ASOF JOIN", "a join on a range, and QUALIFY row_number() OVER (…) = 1"),
    (r"\barg_min\s*\(|\barg_max\s*\(", "arg_min() and arg_max()", "min_by() and max_by()"),
    (r"\bquantile(?:_cont)?\s*\(", "quantile_cont(x, q)", "percentile_cont(q) WITHIN GROUP (ORDER BY x)"),
    (r"\blist\s*\(|\barray_agg\s*\([^)]*\border\s+by\b", "list(x ORDER BY x)", "array_sort(array_agg(x))"),
    (r"\blen\s*\(|\blist_\w+\s*\(", "functions of lists", "array_length(), array_sort() or array_contains()"),
    (r"\blambda\b|\[[^\]]*\bfor\b", "lambda", "a join"),
    (r"\*\s*(?:exclude|replace)\b", "* EXCLUDE and * REPLACE", "* EXCEPT (c), or the names of the columns"),
    (r"\bunion\s+(?:all\s+)?by\s+name\b", "UNION BY NAME", "UNION ALL of columns in the same order"),
    (r"\bmaterialized\b", "MATERIALIZED", "no hint"),
    (r"\bunnest\s*\(", "unnest()", "explode(x) in Spark"),
    (r"\$\d|\$\w", "$name", "the value"),
    (r"\b(?:strptime|strftime|time_bucket|date_diff|epoch_ms)\s*\(", "functions of dates", "epoch(ts) or epoch_us(ts)"),
    (r"\bsimilar\s+to\b|\bregexp_matches\s*\(", "SIMILAR TO and regexp_matches()", "regexp_extract(x, '…', 0) <> ''"),
    (r"(?:^|[\s,(=])\[|\{", "lists and structs in brackets", "one column for each value"),
    (r"\[[^\]]*:(?!:)[^\]]*\]", "x[1:3]", "substring(x, 1, 3)"),
    (r"\bcolumns\s*\(|\bsummarize\b", "COLUMNS() and SUMMARIZE", "the names of the columns"),
    (r"\bdistinct\s+on\b", "DISTINCT ON", "QUALIFY row_number() OVER (PARTITION BY … ORDER BY …) = 1"),
    (r"\busing\s+sample\b", "USING SAMPLE", "TABLESAMPLE (n PERCENT)"),
    (r"\b(?:un)?pivot\b", "PIVOT and UNPIVOT", "max(x) FILTER (WHERE condition) for each column"),
    (r"/", "a division by zero", "a / nullif(b, 0)"),
)
"""Constructs of DuckDB that Spark refuses: a regular expression, the construct, and the form that both engines accept.

The texts and comments of a statement are removed before a search."""


def common_form(text: str, message: str) -> str:
    """Return a sentence about the constructs in `text` that Spark refuses; empty if there is none.

    `message` is the message of Spark.
    """
    code = "".join(
        " '' " if token[0] == "'" else " " if token.startswith(("--", "/*")) else token for token in TOKEN.findall(text)
    )
    zero = "DIVIDE_BY_ZERO" in message
    hints = [
        f"{construct} (write {form})"
        for pattern, construct, form in COMMON_FORMS
        if (pattern == "/") == zero and re.search(pattern, code, re.IGNORECASE | re.DOTALL)
    ]
    return f"Spark does not accept {'; '.join(hints)}" if hints else ""
