"""Tests of comments in JSON configuration files of msprobe, in the forms that its manual contains."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.config.loader import without_comments

DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab/*"\\\n{}', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet="k/*", max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(document=DOCUMENTS, comment=st.text(alphabet="ab/\"'\\{", max_size=8))
def test_comments_between_lines_do_not_change_the_document(document: Any, comment: str) -> None:
    lines = json.dumps(document, indent=1).splitlines()
    text = "\n".join(f"/* {comment.replace('*/', '')} */ {line} // {comment}" for line in lines)

    assert document == json.loads(without_comments(text))


def test_line_and_column_in_errors_are_those_of_the_file():
    text = '{"a": 1, // one\n /* two\n lines */ "b" 2}'
    with pytest.raises(json.JSONDecodeError) as fault:
        json.loads(without_comments(text))

    assert len(text) == len(without_comments(text))
    assert (3, text.splitlines()[2].index("2}") + 1) == (fault.value.lineno, fault.value.colno)


def test_unterminated_comment_is_left_for_the_parser():
    assert "{} /* no end" == without_comments("{} /* no end")
