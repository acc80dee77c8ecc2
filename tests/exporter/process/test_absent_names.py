"""A torch without a name that the exporter reads: training continues, and at most one line reports it."""

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
    how: Any = {"cwd": tmp_path_factory.mktemp("runs"), "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "timeout": 250}
    program = Path(__file__).with_name("absent_names.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False, **how)
    assert 0 == done.returncode, done.stderr[-3000:]
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


OFF = "Rankscope is off, training continues without a monitor: "


def test_training_ends_with_equal_bits_without_any_name(found):
    assert {"import", "_backward_hooks", "_fsdp_param_groups", "_execution_engine", "_version"} <= found.keys()
    assert {"old pyarrow", "no prometheus_client", "no distributed"} <= found.keys()

    assert [] == [name for name, one in found.items() if not one["is_equal"]]


def test_each_step_is_published_without_any_name(found):
    unpublished = {name for name, one in found.items() if one["steps"] != [1, 2, 3]}
    assert {*OF_ALL_RELEASES, "old pyarrow", "no prometheus_client"} == unpublished


def test_at_most_one_line_is_printed_for_a_missing_name(found):
    at_import = found["import"]["lines"]
    lines = {name: one["lines"] for name, one in found.items() if name != "import"}
    assert [] == [name for name, texts in lines.items() if len(texts) > (not name.startswith("none"))]
    assert [] == [line for line in at_import if "training continues" not in line or "traceback" in line]
    assert len(at_import) == len(set(at_import))
    assert "torch.fx._symbolic_trace.is_fx_symbolic_tracing" in "".join(at_import)
    (line,) = lines["_execution_engine"]
    assert line.startswith("a backward hook failed, training continues: torch 2.")
    assert line.endswith(" has no Variable._execution_engine, which it needs")


def test_one_line_names_the_reason_and_the_command(found):
    """For a package that is missing, or that does not fit."""
    missing = "ModuleNotFoundError: No module named 'prometheus_client'; to get one: pip install prometheus_client"
    misfit = "ImportError: pyarrow requires NumPy 2.0 or newer, found 1.26.4; to get one: pip install"
    (line,) = found["old pyarrow"]["lines"]

    assert [OFF + missing] == found["no prometheus_client"]["lines"]
    assert line.startswith(OFF + misfit)
    assert [] == found["no distributed"]["lines"]
