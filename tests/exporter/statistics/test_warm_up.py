"""The warm-up of the compiled kernel, in separate processes: it is optional, and equal runs have equal statistics."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.programs import run_program

needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="numba is not installed: run pip install numba"
)

MEASURE = """
import sys, torch
from rankscope_exporter import statistics
def measure():
    table = statistics.StatisticsTable(1, torch.device("cpu"))
    statistics.MeasureGroup(range(1)).measure([torch.arange(5.0)], table)
    return statistics.finish(statistics.HostCopy(table)).values[2].tolist()
"""


IMPORTED = ("torch", "rankscope_exporter")


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return the output of a process with torch and without numba."""
    return run_program(MEASURE + script, seconds=120, imported=IMPORTED, **environment)


@needs_numba
@pytest.mark.thorough
def test_only_the_warm_up_thread_loads_numba_and_logs_no_compiler(tmp_path: Path):
    done = run(
        """
import logging
logging.basicConfig(level=logging.DEBUG)
print("numba" in sys.modules, statistics.backend_name(), measure())
thread = statistics.warm_up()
print(thread.daemon, statistics.warm_up() is thread)
thread.join()
print(statistics.warm_up(), statistics.backend_name(), measure())
""",
        NUMBA_CACHE_DIR=str(tmp_path),
    )

    assert ["False torch [4.0]", "True True", "None numba [4.0]"] == done.stdout.splitlines(), done.stderr
    assert "numba.core" not in done.stderr


def test_broken_numba_is_reported_once_and_torch_is_used(tmp_path: Path):
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("raise ImportError('Numba needs NumPy 2.1 or less')")
    done = run(f"""
sys.path.insert(0, {str(tmp_path)!r})
statistics.warm_up().join()
print(statistics.backend_name(), measure())
""")

    assert "torch [4.0]\n" == done.stdout
    assert 1 == done.stderr.count("Numba needs NumPy 2.1 or less")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        pytest.param('sys.modules["numba"] = None', "None torch [4.0]", marks=pytest.mark.thorough),
        pytest.param("statistics.warm_up().join()", "None numba [4.0]", marks=needs_numba),
    ],
    ids=["not installed", "without a cache folder"],
)
def test_kernel_is_absent_or_compiled_in_memory_without_a_warning(script, printed):
    done = run(
        f"""
{script}
print(statistics.warm_up(), statistics.backend_name(), measure())
""",
        NUMBA_CACHE_DIR="/dev/null/nowhere",
    )

    assert (f"{printed}\n", "") == (done.stdout, done.stderr)


@needs_numba
@pytest.mark.thorough
def test_process_can_exit_during_the_warm_up(tmp_path: Path):
    done = subprocess.run(  # a separate process: the test is about its exit
        [sys.executable, "-c", MEASURE + "statistics.warm_up(); print('bye')"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
    )

    assert (0, "bye\n", "") == (done.returncode, done.stdout, done.stderr)


@pytest.mark.thorough
@needs_numba
def test_child_forked_during_the_warm_up_can_import_numpy(tmp_path: Path):
    """A data loader's workers are forked early, and import numpy."""
    done = run(
        """
import os
statistics.warm_up()
child = os.fork()
if child == 0:
    import numba
    print("child", numba.__name__, measure(), flush=True)
    os._exit(0)
print("parent", os.waitpid(child, 0)[1])
""",
        NUMBA_CACHE_DIR=str(tmp_path),
    )

    assert ["child numba [4.0]", "parent 0"] == done.stdout.splitlines(), done.stderr


TWO_TRAININGS = """
import sys
import torch
from rankscope_exporter import Monitor, MonitorConfig, statistics
sys.path.insert(0, ".")
from tests.exporter.runs import config_of, published

def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    with Monitor(config_of("parameters", "gradients")).attach(model, optimizer) as monitor:
        for step in range(14):
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(32, 64, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {(row.step, row.entry.kind, row.entry.tensor): row.numbers for row in published(monitor).rows}

before = statistics.backend_name()
found = [trained(), trained()]
print(before, statistics.backend_name(), len(found[0]), found[0] == found[1])
"""


@needs_numba
def test_statistics_do_not_depend_on_when_the_kernel_was_ready():
    """The first training builds the kernel, which is ready from the beginning of the second."""
    done = run_program(TWO_TRAININGS, seconds=120, imported=IMPORTED)

    assert f"torch numba {14 * 4 * 4} True\n" == done.stdout, done.stderr
