"""The tests write nothing into the checkout, in which they run."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = """
from pathlib import Path
def test_one(): Path("-").write_text("rows")
def test_two(): Path("rankscope-records").mkdir(); Path("rankscope-records/seq.1").write_text("ignored by git")
def test_three(): Path("/dev/null").write_text("outside")
"""


def test_a_test_that_writes_into_the_checkout_fails_the_run(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("rankscope-records/\n")
    (tmp_path / "test_three.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "tests.conftest", "--rootdir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RANKSCOPE_REQUIRE_SERVERS": ""}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert 1 == done.returncode, done.stdout + done.stderr
    assert "written into the checkout while the tests ran: -, rankscope-records/\n" in done.stdout
    assert "3 passed" in done.stdout


def test_no_file_of_the_checkout_has_the_name_of_an_output():
    """Such a folder was made by `--output -`, and 412 of its files were committed."""
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False).stdout

    assert not (ROOT / "-").exists()
    assert [] == [name for name in tracked.splitlines() if name.startswith(("-", "rankscope-records"))]
