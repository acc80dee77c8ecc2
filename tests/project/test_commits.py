"""The check of commit subjects accepts `area: imperative` and nothing else."""

import pytest


@pytest.fixture(scope="module")
def check(load_script):
    return load_script("check_commits")


@pytest.mark.parametrize(
    "subject", ["exporter: read gradients", "cli, docs: rename a word", "storage/log: fsync entries"]
)
def test_subject_with_an_area_is_accepted(check, subject):
    assert check.problem(subject) is None


@pytest.mark.parametrize(
    "subject", ["Wrap", "exporter: Read gradients", "exporter: read gradients.", f"cli: {'x' * 70}"]
)
def test_other_subject_is_rejected(check, subject):
    assert check.problem(subject) is not None


def test_missing_base_is_reported(check, capsys):
    assert [] == check.new_subjects("0" * 40)
    assert "not checked" in capsys.readouterr().out
