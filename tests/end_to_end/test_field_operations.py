"""Situations in the operation of the service, each in a file of `tests/data/field_operations`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

CASES: Final = Path(__file__).parents[1] / "data" / "field_operations"
NOT_JUDGED: Final = 77  # Exit status of a case of which a counterpart is missing


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", sorted(path.name for path in CASES.iterdir() if path.suffix in {".py", ".sh"} and path.stem != "situation")
)
def test_situation_of_an_operator(case, monkeypatch, tmp_path):
    """The last line of the output is the reason of a failure."""
    monkeypatch.setenv("RANKSCOPE_BIN", str(Path(sys.executable).parent))
    monkeypatch.delenv("RANKSCOPE_SPOOL_DIR")
    program = sys.executable if case.endswith(".py") else "bash"
    done = subprocess.run(
        [program, CASES / case], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    if done.returncode == NOT_JUDGED:
        pytest.skip(done.stdout.strip())

    assert 0 == done.returncode, done.stdout + done.stderr
