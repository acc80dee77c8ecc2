"""Tests of the check of plain English, and of the sample of texts for grading."""

import json
from pathlib import Path
from types import ModuleType
from unittest.mock import ANY

import pytest

LONG_SENTENCE = " ".join(["The rank sends", *["one more record and"] * 10, "stops."])
LONG_NAME = "test_" + "a_name_that_is_too_long_" * 3 + "x"


@pytest.fixture(scope="module")
def check(load_script) -> ModuleType:
    return load_script("check_language")


@pytest.fixture
def repository(check, tmp_path, monkeypatch) -> Path:
    """Return a folder that `main` checks: `docs/page.md` has one finding, and there are no exceptions."""
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text("The service is told.\n")
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "EXCEPTIONS", tmp_path / "docs" / "language_exceptions.json")
    monkeypatch.setattr(check, "_tracked_files", lambda: [page])
    return tmp_path


def except_from_check(repository: Path, *matches: str) -> None:
    exceptions = [{"path": "docs/page.md", "match": match, "reason": "correct English"} for match in matches]
    (repository / "docs" / "language_exceptions.json").write_text(json.dumps(exceptions))


TOLD = 'raise ValueError("the rank was told to stop")\n'
TEXTS = {
    "docstring": ("module.py", '"""Return the value that was told."""\n', [(1, "told")]),
    "docstring of a constant": ("module.py", 'X = 1\n"""The value that was told."""\n', [(2, "told")]),
    "comment": ("module.py", "# it is told of the change\nX = 1\n", [(1, "told")]),
    "string": ("package/module.py", TOLD, [(1, "told")]),
    "string of a test": ("tests/module.py", TOLD, []),
    "test name": ("module.py", "def test_the_rank_is_told():\n    pass\n", [(1, "told")]),
    "code of Markdown": ("page.md", "# Page\n\n```\nwho is told\n```\n\nThe service is told.\n", [(7, "told")]),
    "plain text and code": ("module.py", '"""Return the last step."""\nwho = {"what": "told"}\n', []),
    "sentence of more than 40 words": ("page.md", f"{LONG_SENTENCE}\n", [(1, ANY)]),
    "sentence of a docstring": ("module.py", f'"""{LONG_SENTENCE}"""\n', [(1, ANY)]),
    "test name of 73 characters": ("test_module.py", f"def {LONG_NAME}():\n    pass\n", [(1, LONG_NAME)]),
    "test name of 72 characters": ("test_module.py", f"def {LONG_NAME[:72]}():\n    pass\n", []),
}


@pytest.mark.parametrize("case", TEXTS)
def test_findings_are_in_each_kind_of_text_but_not_in_code(check, tmp_path, case):
    name, text, expected = TEXTS[case]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)

    assert expected == [(finding.line, finding.match) for finding in check.findings_in(tmp_path / name)]


def test_only_findings_with_an_exception_and_no_unused_exception_pass(check, repository, capsys):
    assert 1 == check.main([])
    assert "docs/page.md:1: 'told'" in capsys.readouterr().out
    except_from_check(repository, "told")
    assert 0 == check.main([])
    except_from_check(repository, "told", "said")
    assert 1 == check.main([])
    assert "matches nothing, remove it" in capsys.readouterr().out


def test_every_exception_has_a_reason(check):
    exceptions = json.loads(check.EXCEPTIONS.read_text())

    assert [] == [one for one in exceptions if {"path", "match", "reason"} != set(one) or not one["reason"]]
