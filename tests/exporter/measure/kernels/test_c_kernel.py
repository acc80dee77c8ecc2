"""The compiled kernel for CPUs: its results on any number of threads and any processor, and its absence."""

import array
import os
import subprocess
import sys
from pathlib import Path

import hatch_build
import pytest
import torch
from tests.exporter.measure.kernels.conftest import CPU, numbers

from rankscope_exporter.measure.kernels import c_kernel, compiled
from rankscope_exporter.measure.kernels.compiled import COMPILED_FROM_STEP, KernelWarmUp, backend_name
from rankscope_exporter.measure.kernels.measure_group import MeasureGroup
from rankscope_exporter.measure.kernels.statistics_table import StatisticsTable

HERE = Path(__file__).parent
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g")
ONE_PROCESSOR = "-DFOR_EACH_PROCESSOR="


def printed_by(program: Path, *flags: str) -> str:
    """Return the output of `kernel_checks.c`, compiled with `flags`."""
    places = [f"-I{hatch_build.FOLDER}", '-DSOURCE=""', str(HERE / "kernel_checks.c"), "-o", str(program)]
    options = [flag for flag in hatch_build.FLAGS if flag != "-shared"]
    subprocess.run([*hatch_build.compiler(), *options, *flags, *places], check=True, timeout=120)
    return subprocess.run([program], check=True, capture_output=True, text=True, timeout=120).stdout


def test_sanitizers_find_no_fault_and_each_processor_gives_the_same_bits(require_server, tmp_path):
    require_server("gcc", "g++")
    usual = printed_by(tmp_path / "usual")

    assert 120 == usual.count("\n")
    assert usual == printed_by(tmp_path / "sanitized", ONE_PROCESSOR, *SANITIZED)
    assert usual == printed_by(tmp_path / "plain", ONE_PROCESSOR, "-O2")


THREADS = """
import os, torch
from rankscope_exporter.measure.kernels.compiled import backend_name
from rankscope_exporter.measure.kernels.measure_group import MeasureGroup
from rankscope_exporter.measure.kernels.statistics_table import StatisticsTable
from tests.exporter.measure.kernels.conftest import CPU, numbers
def measured(threads):
    torch.set_num_threads(threads)
    table = StatisticsTable(len(tensors), CPU)
    table.accumulate(["kurtosis"])
    MeasureGroup(range(len(tensors))).measure(tensors, table)
    return table.buffer
tensors = [numbers(size, dtype) for dtype in (torch.float32, torch.bfloat16) for size in (3, 1 << 15, 1_000_001)]
tensors[2][7], tensors[2][900_000] = torch.nan, torch.inf
alone = measured(1)
before = len(os.listdir("/proc/self/task"))
print(backend_name(), *(torch.equal(alone, measured(threads)) for threads in (2, 3)), flush=True)
print(len(os.listdir("/proc/self/task")) - before, flush=True)
child = os.fork()
if child == 0:
    print("child", torch.equal(alone, measured(3)), flush=True)
    os._exit(0)
print("parent", os.waitpid(child, 0)[1], torch.equal(alone, measured(3)))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted by /proc")
def test_threads_of_torch_measure_and_results_do_not_depend_on_their_number(require_server):
    """A forked child has no such threads, and measures alone. With OMP_NUM_THREADS=1, torch started none before."""
    require_server("gcc", "g++")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", THREADS]  # a separate process: it must not be a forked one
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)

    assert ["C True True", "2", "child True", "parent 0 True"] == done.stdout.splitlines(), done.stderr


def test_small_tensors_start_no_thread(monkeypatch):
    monkeypatch.setattr(
        "rankscope_exporter.measure.kernels.measure_group.openmp_parallel", lambda: pytest.fail("a team")
    )
    table = StatisticsTable(200, CPU)
    MeasureGroup(range(200)).measure([numbers(1 << 15, torch.float32)] * 200, table)

    assert [1 << 15] * 200 == table.counts[-1].tolist()


def test_more_elements_than_the_interpreter_lock_is_kept_for(monkeypatch, measured, check):
    monkeypatch.setattr("rankscope_exporter.measure.kernels.measure_group._MOST_LOCKED", 5)
    tensors = [numbers(4, torch.float32), numbers(9, torch.float64)]
    finished = measured(tensors)

    for entry, tensor in enumerate(tensors):
        check(finished, entry, tensor)


def test_older_torch_without_the_exchange_interface_of_dlpack(monkeypatch, measured, check):
    kernel = c_kernel.c_kernel()
    monkeypatch.setattr(kernel, "python", array.array("q", (0, *kernel.python[1:])))
    tensors = [numbers(9, torch.float32), numbers(8, torch.float64).view(2, 4).t(), numbers(9, torch.bfloat16)[::2]]
    for entry, tensor in enumerate(tensors):
        check(measured(tensors), entry, tensor)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "there was no C compiler when Rankscope was built"),
        (b"of another source", "it was compiled from another source: install Rankscope again"),
        (hatch_build.source_hash().encode(), "invalid ELF header"),
    ],
)
def test_kernel_that_cannot_be_loaded_is_reported_once_and_torch_is_used(
    content, reason, monkeypatch, tmp_path, caplog, check
):
    library = tmp_path / "_kernel.so"
    if content is not None:
        library.write_bytes(content)
    monkeypatch.setattr(c_kernel, "LIBRARY", library)
    c_kernel.c_kernel.cache_clear()
    try:
        assert ("torch", "torch") == (backend_name(), backend_name(coming=True))
        table = StatisticsTable(1, CPU)
        MeasureGroup(range(1)).measure([torch.arange(5.0)], table)
    finally:
        c_kernel.c_kernel.cache_clear()

    assert 10.0 == float(table.sums[3, 0])
    (record,) = caplog.records
    assert f"the C kernel cannot be used ({reason}" in record.getMessage().replace(f"{library}: ", "")
    assert record.getMessage().endswith("): tensor statistics are computed with torch operations")


def test_step_from_which_a_device_kernel_measures_is_fixed(monkeypatch):
    """The tenth step waits for the compilation, which the third one starts."""

    class Build:
        def join(self, seconds: float) -> None:
            events.append(seconds)

        def is_alive(self) -> bool:
            return False

    events: list[object] = []
    monkeypatch.setattr(compiled, "warm_up", lambda _device: events.append("built") or Build())
    warm_up = KernelWarmUp(torch.device("cuda", 0), lambda: events.append("used"))
    for step in range(1, 12 * COMPILED_FROM_STEP):
        warm_up.on_sampling_decided(step % 2 == 0)
        if step in (3, 9, 11, 99):
            events.append(step)

    assert [3, "built", 9, "built", 5.0, "used", 11, 99] == events
