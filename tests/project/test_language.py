"""Tests of the check of plain English, and of the sample of texts for grading."""

import json
from pathlib import Path
from types import ModuleType

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


def matches(check: ModuleType, path: Path, text: str) -> list[tuple[int, str]]:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return [(finding.line, finding.match) for finding in check.findings_in(path)]


def except_from_check(repository: Path, *matches: str) -> None:
    exceptions = [{"path": "docs/page.md", "match": match, "reason": "correct English"} for match in matches]
    (repository / "docs" / "language_exceptions.json").write_text(json.dumps(exceptions))


@pytest.mark.parametrize(
    "source",
    [
        pytest.param('"""Return what it was told."""\n', id="docstring"),
        pytest.param('X = 1\n"""The value that was told."""\n', id="docstring of a constant"),
        pytest.param("# it is told of the change\nX = 1\n", id="comment"),
        pytest.param('raise ValueError("the rank was told to stop")\n', id="error text"),
        pytest.param("def test_the_rank_is_told():\n    pass\n", id="test name"),
    ],
)
def test_expression_is_found_in_each_kind_of_python_text(check, tmp_path, source):
    assert "told" in [match for _, match in matches(check, tmp_path / "module.py", source)]


def test_line_of_a_finding_in_markdown_ignores_code(check, tmp_path):
    page = "# Page\n\n```\nwho is told\n```\n\nThe service is told.\n"

    assert [(7, "told")] == matches(check, tmp_path / "page.md", page)


def test_strings_are_checked_outside_of_tests_only(check, tmp_path):
    source = 'raise ValueError("the rank was told to stop")\n'

    assert [(1, "told")] == matches(check, tmp_path / "package" / "module.py", source)
    assert [] == matches(check, tmp_path / "tests" / "module.py", source)


@pytest.mark.parametrize("name", ["module.py", "page.md"])
def test_sentence_of_more_than_40_words_is_found(check, tmp_path, name):
    text = f'"""{LONG_SENTENCE}"""\n' if name.endswith(".py") else f"{LONG_SENTENCE}\n"

    assert [1] == [line for line, _ in matches(check, tmp_path / name, text)]


def test_test_name_of_more_than_72_characters_is_found(check, tmp_path):
    longest_allowed = LONG_NAME[:72]
    source = f"def {LONG_NAME}():\n    pass\n\n\ndef {longest_allowed}():\n    pass\n"

    assert [LONG_NAME] == [match for _, match in matches(check, tmp_path / "test_module.py", source)]


def test_plain_text_and_code_have_no_finding(check, tmp_path):
    source = '"""Return the last step."""\nwho = {"what": "told"}\n'

    assert [] == matches(check, tmp_path / "module.py", source)


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
