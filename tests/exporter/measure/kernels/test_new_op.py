"""An op that needs a new sum is two additions to the file of the ops, and one line in the source of the kernel."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import hatch_build
import pytest

OP = """    Op(
        name="cubed",
        doc="Mean of the cubes.",
        accumulators=("sum_of_cubes",),
        finish=lambda sums: sums["sum_of_cubes"] / sums["finite"],
        is_default=False,
    ),
    _count("nans","""

MEASURE = """
import torch
from rankscope_contract.model.kinds import VALUE_OPS
from rankscope_exporter.measure.kernels.compiled import backend_name
from rankscope_exporter.measure.kernels.measure_group import MeasureGroup
from rankscope_exporter.measure.kernels.statistics_table import HostCopy, StatisticsTable
from rankscope_exporter.measure.kernels import triton_kernels
from rankscope_exporter.measure.kernels.compiled import CHUNK, DeviceArguments
sizes, dtypes = (7, CHUNK + 3), (torch.float32, torch.float64)
tensors = [torch.linspace(-1, 3, size, dtype=dtype) for size in sizes for dtype in dtypes]
tensors[0][2], tensors[1][3] = torch.nan, torch.inf
def table(**settings):
    found = StatisticsTable(len(tensors), torch.device("cpu"), **settings)
    found.accumulate(["kurtosis", "cubed"])
    return found
compiled, plain, triton = table(), table(compiled=False), table()
MeasureGroup(range(4)).measure(tensors, compiled)
MeasureGroup(range(4)).measure(tensors, plain)
assert DeviceArguments(range(4)).run(triton_kernels.measure_jobs, tensors, triton) == []
truth = [tensor[tensor.isfinite()].double().pow(3).mean() for tensor in tensors]
for found in (compiled, plain, triton):
    values = torch.from_numpy(HostCopy(found).finish().values)
    assert torch.allclose(values[VALUE_OPS.index("cubed")].double(), torch.stack(truth), rtol=1e-5), values
    assert torch.allclose(values[VALUE_OPS.index("kurtosis")][2:], torch.tensor(2.241), rtol=1e-3), values
print(backend_name())
"""


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert 1 == text.count(old), old
    file.write_text(text.replace(old, new))


def test_op_with_a_new_sum_is_an_addition_to_one_file_and_a_line_of_c(require_server, tmp_path):
    """The kernel in C, torch operations and the kernel for CUDA devices then measure the op."""
    require_server("gcc", "g++")
    packages = hatch_build.FOLDER.parents[2]
    shutil.copytree(packages, tmp_path / "exporter", ignore=shutil.ignore_patterns("__pycache__", "_kernel*"))
    shutil.copy(hatch_build.__file__, tmp_path)
    kinds = tmp_path / "exporter" / "rankscope_contract" / "model" / "kinds.py"
    replace(kinds, '    _count("nans",', OP)
    replace(
        kinds, "SUMMANDS: Final[dict", "def _cube(x: float) -> float:\n    return x * x * x\n\n\nSUMMANDS: Final[dict"
    )
    replace(kinds, "_fourth_power}", '_fourth_power, "sum_of_cubes": _cube}')
    source = tmp_path / "exporter" / "rankscope_exporter" / "measure" / "kernels" / "kernel.c"
    source.write_text(source.read_text() + "EXTRA_SUM(sum_of_cubes, x * x * x)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "exporter"), "TRITON_INTERPRET": "1"}
    for command in (str(tmp_path / "hatch_build.py"),), ("-c", MEASURE):
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stderr

    assert "C\n" == done.stdout


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rankscope_exporter.measure.kernels import triton_kernels
tensors = {"jobs": "*i64", "chunks": "*i64", "table": "*i64", "partials": "*fp64", "stride": "i64"}
constants = {"TERM": triton_kernels._term("sum_of_fourth_powers"), "ROW": 8, "BLOCK": 1024, "SIZE": 16384}
source = ASTSource(triton_kernels._measure_chunks, tensors | dict.fromkeys(constants, "constexpr"), constants)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"].count("mul.f64") > 0)
"""


@pytest.mark.thorough
def test_triton_compiles_the_summand_for_a_device():
    """Its interpreter also runs functions that the compiler refuses."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)

    assert "True\n" == done.stdout, done.stderr
