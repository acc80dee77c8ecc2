"""Tests of escaping: a user-defined name is unchanged after a round trip and causes no injection."""

from __future__ import annotations

import html
import pathlib
import sqlite3
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rankscope_contract.security.escaping import (
    LONGEST_FILE_NAME,
    file_name,
    from_path_segment,
    html_text,
    label_value,
    path_segment,
    sql_identifier,
    sql_string,
)

# Lone surrogates are excluded, because they have no UTF-8 encoding.
names = st.text(st.characters(exclude_categories=["Cs"]))
AWKWARD = ["", ".", "..", "../x", "a=b", "lr'\"", "学习", "%", "%2E", "a/b", "a\\b", "~", "a b", "-", ".hidden", "\x00"]


@pytest.mark.parametrize("name", AWKWARD)
def test_path_segment_cannot_leave_its_folder(name):
    segment = path_segment(name)
    path = pathlib.PurePosixPath("/store") / segment

    assert pathlib.PurePosixPath("/store") == path.parent
    assert segment == path.name
    assert not set(segment) & set("/\\=\x00 ")
    assert not segment.startswith(".")


@given(names, names)
@example("..", "")
@example("%", ".")
def test_path_segments_are_distinct_and_are_read_as_they_were_written(first, second):
    assert (first == second) == (path_segment(first) == path_segment(second))
    assert first == from_path_segment(path_segment(first))


@given(names, names.filter(lambda name: name.replace("\x00", "")))
def test_sql_text_and_identifier_are_read_as_they_were_written(text, name):
    """SQLite represents all engines that follow the SQL standard. Only SQLite ends a text at NUL."""
    text, name = (part.replace("\x00", "") for part in (text, name))
    cursor = sqlite3.connect(":memory:").execute(f"SELECT {sql_string(text)} AS {sql_identifier(name)}")

    assert (name, (text,)) == (cursor.description[0][0], cursor.fetchone())


@given(names)
def test_html_text_and_label_value_are_read_as_they_were_written(name):
    escaped, label = html_text(name), label_value(name)
    unescaped = label.replace("\\\\", "\0").replace('\\"', '"').replace("\\n", "\n").replace("\0", "\\")

    assert name == html.unescape(escaped)
    assert not set(escaped) & set("<>\"'")
    assert "\n" not in label
    assert "\0" in name or name == unescaped


@given(names, names)
@example("a/b", "a_b")
@example("学" * 300, "学" * 299)
@example("e\N{COMBINING ACUTE ACCENT}", "\N{LATIN SMALL LETTER E WITH ACUTE}")
def test_different_names_have_different_file_names_that_are_safe(name, other):
    found = [file_name(name), file_name(other), file_name(file_name(name)), file_name(name, "x"), file_name("x", name)]

    assert (name == other) == (found[0] == found[1])
    for one in found:
        assert not set(one) & set("/\\\x00 \n")
        assert one[0] not in ".-"
        assert LONGEST_FILE_NAME >= len(one.encode())
        assert unicodedata.is_normalized("NFC", one)


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (("llama-1b", "overview"), "llama-1b-overview"),
        (("实验一",), "实验一"),
        (("परीक्षण_α.2",), "परीक्षण_α.2"),
        (("a/b",), "a_b~"),
        (("-rf",), "rf~"),
        (("..",), "unnamed~"),
        (("a", "b-c"), "a-b-c~"),
        (("a~",), "a_~"),
    ],
)
def test_file_name_keeps_letters_and_marks_every_other_change(parts, name):
    found = file_name(*parts)

    assert name == found[: len(name)]
    assert (len(name) + 8 if name.endswith("~") else len(name)) == len(found)
