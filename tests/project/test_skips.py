"""Skipped tests are counted by reason. In CI, a skip is a failure unless another command runs the test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, reason: str, *, in_ci: bool) -> subprocess.CompletedProcess[str]:
    (folder / "test_skipped.py").write_text(f"import pytest\ndef test_one():\n    pytest.skip({reason!r})\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RANKSCOPE_REQUIRE_SERVERS": "1" if in_ci else ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("reason", "in_ci", "code"), [("make test-crashes", True, 0), ("no server", True, 1), ("no server", False, 0)]
)
def test_skip_fails_in_ci_unless_another_command_runs_the_test(tmp_path, reason, in_ci, code):
    done = run(tmp_path, reason, in_ci=in_ci)

    assert code == done.returncode, done.stdout + done.stderr
    assert f"1 skipped: {reason}" in done.stdout
