"""The check of plain English finds expressions in each kind of text."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def check(load_script):
    return load_script("check_language")


@pytest.mark.parametrize(
    "source",
    [
        '"""Return what it was told."""\n',
        "# it is told of the change\nX = 1\n",
        'raise ValueError("the rank was told to stop")\n',
        "def test_the_rank_is_told():\n    pass\n",
    ],
)
def test_expression_is_found_in_each_kind_of_text(check, tmp_path, source):
    path = tmp_path / "module.py"
    path.write_text(source)

    assert "told" in [expression for _, expression, _ in check.findings_in(path)]


def test_finding_names_its_line(check, tmp_path):
    path = tmp_path / "page.md"
    path.write_text("# Page\n\n```\nwho is told\n```\n\nThe service is told.\n")

    assert [(7, "told")] == [(line, expression) for line, expression, _ in check.findings_in(path)]


def test_plain_text_and_code_have_no_finding(check, tmp_path):
    path = tmp_path / "module.py"
    path.write_text('"""Return the last step."""\nwho = {"what": "told"}\n')

    assert [] == check.findings_in(path)
