"""A user-defined name survives every escaping and causes no injection."""

from __future__ import annotations

import html
import pathlib
import sqlite3

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rankscope_contract.security.escaping import (
    from_path_segment,
    html_text,
    label_value,
    path_segment,
    sql_identifier,
    sql_string,
)

# A lone surrogate is no text: it has no UTF-8.
names = st.text(st.characters(exclude_categories=["Cs"]))
AWKWARD = [
    "",
    ".",
    "..",
    "../x",
    "a=b",
    "lr'\"",
    "学习",
    "123",
    "%",
    "%2E",
    "a/b",
    "a\\b",
    "~",
    "a b",
    "-",
    ".hidden",
    "\x00",
]


@given(names)
@example("..")
@example("")
@example("%")
def test_a_name_comes_back_from_its_path_segment(name):
    assert name == from_path_segment(path_segment(name))


@pytest.mark.parametrize("name", AWKWARD)
def test_a_segment_stays_in_its_folder(name):
    segment = path_segment(name)
    path = pathlib.PurePosixPath("/store") / segment

    assert pathlib.PurePosixPath("/store") == path.parent
    assert segment == path.name
    assert not set(segment) & set("/\\=\x00 ")
    assert not segment.startswith(".")


@given(first=names, second=names)
def test_different_names_have_different_segments(first, second):
    assert (first == second) == (path_segment(first) == path_segment(second))


@given(names)
def test_a_sql_string_is_read_back_as_written(name):
    """SQLite speaks for all engines that follow the standard; it alone ends a text at NUL."""
    name = name.replace("\x00", "")
    (read,) = sqlite3.connect(":memory:").execute(f"SELECT {sql_string(name)}").fetchone()

    assert name == read


@given(names.filter(lambda name: name and "\x00" not in name))
def test_a_sql_identifier_names_the_column(name):
    cursor = sqlite3.connect(":memory:").execute(f"SELECT 1 AS {sql_identifier(name)}")

    assert name == cursor.description[0][0]


@given(names)
def test_html_text_is_read_back_as_written(name):
    escaped = html_text(name)

    assert name == html.unescape(escaped)
    assert not set(escaped) & set("<>\"'")


@given(names)
def test_a_label_value_holds_no_bare_quote_and_no_line_end(name):
    escaped = label_value(name)
    unescaped = escaped.replace("\\\\", "\0").replace('\\"', '"').replace("\\n", "\n").replace("\0", "\\")

    assert "\n" not in escaped
    if "\0" not in name:
        assert name == unescaped
