"""Cases of people whose notifications were not delivered, each as its own program with a service and a rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parents[1] / "data" / "field_operations"

pytestmark = pytest.mark.thorough  # tests/ingest/notify shows the same in one process


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the commands `rankscope` and `python` of this environment."""
    folder = tmp_path_factory.mktemp("bin")
    for name, arguments in (("rankscope", "-m rankscope "), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments}"$@"\n')
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("case", ["notify_failure_is_seen", "notify_loopback_and_proxy", "notify_says_why"])
def test_case_is_right(case: str, commands: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANKSCOPE_BIN", str(commands))
    command = [sys.executable, CASES / f"{case}.py.txt"]  # the checks of our texts read *.py
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr
