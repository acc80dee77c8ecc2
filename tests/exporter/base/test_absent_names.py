"""A torch without a name that the exporter reads: training continues, and at most one line reports it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

OF_ALL_RELEASES = {"_modules", "_parameters"}
"""Names without which a module has no parameters at all."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the result of the training without each name, by name."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("absent_names.py"))],
        cwd=tmp_path_factory.mktemp("runs"),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-3000:]
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_training_ends_with_equal_bits_without_any_name(found):
    assert {"import", "_backward_hooks", "_fsdp_param_groups", "_execution_engine", "_version"} <= found.keys()

    assert [] == [name for name, one in found.items() if not one["is_equal"]]


def test_each_step_is_published_without_any_name(found):
    assert OF_ALL_RELEASES == {name for name, one in found.items() if one["steps"] != [1, 2, 3]}


def test_at_most_one_line_is_printed_for_a_missing_name(found):
    at_import = found["import"]["lines"]
    others = {name: one["lines"] for name, one in found.items() if name != "import"}
    assert [] == [name for name, lines in others.items() if len(lines) > (not name.startswith("none"))]
    assert [] == [line for line in at_import if "training continues" not in line or "traceback" in line]
    assert len(at_import) == len(set(at_import))
    assert "torch.fx._symbolic_trace.is_fx_symbolic_tracing" in "".join(at_import)
    line = found["_execution_engine"]["lines"][0]
    assert line.startswith("a backward hook failed, training continues: torch 2.")
    assert line.endswith(" has no Variable._execution_engine, which it needs")
