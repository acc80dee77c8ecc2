"""Import of Megatron text on one core, stored: rate and peak memory at growing sizes; a repeated import.

python benchmarks/importers.py [MEGABYTES …]
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from _rows import Row, print_rows

SIZES = (100, 300, 1000)
_ROWS_A_CHUNK = 2000

_MEASURED = """
import json, os, resource, sys, time
os.sched_setaffinity(0, {next(iter(os.sched_getaffinity(0)))})  # one core for everything, Arrow's threads included
import pyarrow as pa
pa.set_cpu_count(1)
from pathlib import Path
path, store = Path(sys.argv[1]), Path(sys.argv[2])
from rankscope_ingest.importers import find_importer, import_records
from rankscope_storage.api.store import Store
began, cpu = time.perf_counter(), time.process_time()
with Store.open(store, create=True).claim(owner="bench") as writer:
    report = import_records(path, writer, find_importer(path), run="bench")
print(json.dumps([time.perf_counter() - began, time.process_time() - cpu,
    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, report.records, report.rows_stored]))
"""


def run(sizes: tuple[int, ...] = SIZES) -> list[Row]:
    rows = []
    for megabytes in sizes:
        folder = Path(tempfile.mkdtemp())
        try:
            path = folder / "train.log"
            _write_log(path, megabytes * 1_000_000)
            size = path.stat().st_size / 1e6
            rows += _rows(f"{megabytes:,} MB", path, size, "first import")
            if megabytes == sizes[-1]:
                rows += _rows(f"{megabytes:,} MB again", path, size, "nothing new")
        finally:
            shutil.rmtree(folder)
    return rows


def _rows(what: str, path: Path, size: float, note: str) -> list[Row]:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(path), str(path.parent / "store")],
        check=True,
        capture_output=True,
        text=True,
    )
    seconds, cpu, peak, records, stored = json.loads(done.stdout)
    return [
        Row(f"{what}: rate", size / seconds, "MB/s", f"{note}: {records:,} records, {stored:,} new rows"),
        Row(f"{what}: rate by CPU time", size / cpu, "MB/s", "on one core without other load"),
        Row(f"{what}: peak resident memory", peak, "MiB", f"{seconds:,.1f} s"),
    ]


def _write_log(path: Path, size: int) -> None:
    """Write what a mixture-of-experts run of one printing rank would, companion lines and a restart included."""
    step = 0
    with path.open("w") as file:
        while file.tell() < size:
            for _ in range(_ROWS_A_CHUNK):
                step += 1
                file.write(_row(step))
                if step % 100 == 0:
                    file.write(_companions(step))
            if step % (50 * _ROWS_A_CHUNK) == 0:
                file.write("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 5.\n")
                step -= 150


def _row(step: int) -> str:
    seconds = step * 4 % 86_400
    time = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}.{step % 1000:03d}000"
    loss = "" if step % 5000 == 0 else f"lm loss: {2 + step % 1013 / 1000:.6E} | "
    return (
        f"[default7]: [2025-02-{1 + step * 4 // 86_400 % 28:02d} {time}] iteration {step:8d}/ 9999999 | "
        f"consumed samples: {step * 2048:12d} | elapsed time per iteration (ms): {4000 + step % 977 / 10:.1f} | "
        f"throughput per GPU (TFLOP/s/GPU): {330 + step % 100 / 10:.1f} | "
        f"learning rate: {3e-6 + step % 1000 * 1e-9:.6E} | global batch size:  2048 | {loss}"
        f"load_balancing_loss: {0.98 + step % 97 / 10_000:.6E} | loss scale: 1.0 | "
        f"grad norm: {1 + step % 331 / 1000:.3f} | num zeros: {111_392_856 - step % 1000:.1f} | "
        f"params norm: {2120 + step % 91 / 1000:.3f} | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |\n"
    )


def _companions(step: int) -> str:
    return (
        "(min, max) time across ranks (ms):\n"
        f"    forward-backward ...............................: ({3290 + step % 7}.18, {3900 + step % 11}.08)\n"
        f"    optimizer ......................................: ({52 + step % 3}.20, {57 + step % 5}.11)\n"
        f"saving checkpoint at iteration {step:7d} to ./ckpt in torch_dist format\n"
        f"  successfully saved checkpoint from iteration {step:7d} to ./ckpt\n"
        f" validation loss at iteration {step} | lm loss value: {2 + step % 13 / 10:.6E} | lm loss PPL: 7.645E+00 |\n"
    )


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run(tuple(map(int, sys.argv[1:])) or SIZES))
