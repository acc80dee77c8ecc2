"""The check of commit subjects accepts `area: imperative` and nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_commits", ROOT / "docs" / "check_commits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "subject", ["exporter: read gradients", "cli, docs: rename a word", "storage/log: fsync entries"]
)
def test_a_subject_with_an_area_is_accepted(check, subject):
    assert check.problem(subject) is None


@pytest.mark.parametrize(
    "subject", ["Wrap", "exporter: Read gradients", "exporter: read gradients.", f"cli: {'x' * 70}"]
)
def test_another_subject_is_rejected(check, subject):
    assert check.problem(subject) is not None


def test_a_base_that_is_missing_is_reported(check, capsys):
    assert [] == check.new_subjects("0" * 40)
    assert "not checked" in capsys.readouterr().out
