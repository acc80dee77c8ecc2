"""One pass over 149 gradients of a GPT (12 layers, d=256, 10.5 million elements), by two checkouts in turn.

    python benchmarks/kernel_of_two_checkouts.py OTHER_PYTHON OTHER_CHECKOUT THREADS

Each round overwrites 16 MB before each of five passes, and keeps the fastest one. "moved": the tensors have another
address in each pass, as gradients do. Prints the smallest and the median time of 40 rounds in ms, and the memory of the
process. With two threads and other work on the machine, only the smallest times are reliable.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

WORKER = """
import json, sys, time, torch
from pathlib import Path
from rankscope_exporter.measure.kernels.compiled import backend_name, warm_up
from rankscope_exporter.measure.kernels.measure_group import MeasureGroup
from rankscope_exporter.measure.kernels.statistics_table import StatisticsTable
torch.set_num_threads(int(sys.argv[1]))
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024
before = resident()
try:  # up to D-610, a thread compiled the kernel
    if (thread := warm_up()) is not None:
        thread.join()
except TypeError:
    pass
block = [256, 256, 196608, 768, 65536, 256, 256, 256, 262144, 1024, 262144, 256]
sizes = [524288, 16384, *block * 12, 256, 256, 524288]
print(json.dumps({"backend": backend_name(), "memory": resident() - before}), flush=True)
def kept(dtype):
    tensors = [(torch.randn(size) * 1e-3).to(dtype) for size in sizes]
    return tensors, StatisticsTable(len(sizes), torch.device("cpu")), MeasureGroup(range(len(sizes)))
sets = {name: kept(getattr(torch, name)) for name in ("float32", "bfloat16")}
for line in sys.stdin:
    dtype, moves = json.loads(line)
    tensors, table, group = sets[dtype]
    found = []
    for _ in range(5):
        tensors = [tensor.clone() for tensor in tensors] if moves else tensors
        torch.ones(4_000_000).add_(1)
        began = time.perf_counter(), time.process_time()
        group.measure(tensors, table)
        found.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    print(json.dumps([min(column) * 1e3 for column in zip(*found)]), flush=True)
"""


class Worker:
    def __init__(self, python: str, checkout: Path, threads: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout / "exporter")}
        self._process = subprocess.Popen(
            [python, "-c", WORKER, threads], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.start = self._read()

    def _read(self):
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def measure(self, dtype: str, *, moves: bool) -> tuple[float, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([dtype, moves]) + "\n")
        self._process.stdin.flush()
        return self._read()


def main(python: str, checkout: str, threads: str) -> None:
    workers = {
        "other": Worker(python, Path(checkout), threads),
        "this": Worker(sys.executable, Path(__file__).resolve().parents[1], threads),
    }
    for name, worker in workers.items():
        print(name, worker.start)
    print("| | | wall, smallest | median | CPU, smallest | median |\n|---|---|---:|---:|---:|---:|")
    for dtype in ("float32", "bfloat16"):
        for moves in (False, True):
            rounds = [{name: worker.measure(dtype, moves=moves) for name, worker in workers.items()} for _ in range(40)]
            for name in workers:
                columns = list(zip(*(found[name] for found in rounds), strict=True))
                numbers = [f"{each:.2f}" for column in columns for each in (min(column), statistics.median(column))]
                print(f"| {dtype}{', moved' * moves} | {name} | {' | '.join(numbers)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
