"""A test that writes into the checkout, or that is skipped in CI without another command for it, fails the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WRITING = """
from pathlib import Path
def test_one(): Path("-").write_text("rows")
def test_two(): Path("rankscope-records").mkdir(); Path("rankscope-records/seq.1").write_text("ignored by git")
def test_three(): Path("/dev/null").write_text("outside")
"""


def run(folder: Path, text: str, *options: str, servers: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "test_three.py").write_text(text)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RANKSCOPE_REQUIRE_SERVERS": servers}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--rootdir", str(folder), *options]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def test_a_test_that_writes_into_the_checkout_fails_the_run(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("rankscope-records/\n")
    done = run(tmp_path, WRITING, "-n", "1")

    assert 1 == done.returncode, done.stdout + done.stderr
    assert "written into the checkout while the tests ran: -, rankscope-records/\n" in done.stdout
    assert "3 passed" in done.stdout


def test_no_file_of_the_checkout_has_the_name_of_an_output():
    """Such a folder was made by `--output -`, and 412 of its files were committed."""
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False).stdout

    assert not (ROOT / "-").exists()
    assert [] == [name for name in tracked.splitlines() if name.startswith(("-", "rankscope-records"))]


@pytest.mark.parametrize(
    ("reason", "servers", "code"), [("make test-crashes", "1", 0), ("no server", "1", 1), ("no server", "", 0)]
)
def test_skip_fails_in_ci_unless_another_command_runs_the_test(tmp_path, reason, servers, code):
    skipping = f"import pytest\ndef test_one():\n    pytest.skip({reason!r})\n"
    done = run(tmp_path, skipping, str(tmp_path), servers=servers)

    assert code == done.returncode, done.stdout + done.stderr
    assert f"1 skipped: {reason}" in done.stdout
