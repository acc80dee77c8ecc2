"""Import of many logs of five steps by the command: time, files, commits and memory.

python benchmarks/small_logs.py [LOGS …]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _rows import Row, print_rows

COUNTS = (600, 3000)
STEPS = 5


def run(counts: tuple[int, ...] = COUNTS) -> list[Row]:
    return [row for count in counts for row in _rows(count)]


def _rows(count: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as temporary:
        logs, store = Path(temporary) / "logs", Path(temporary) / "store"
        logs.mkdir()
        for number in range(count):
            (logs / f"run{number:05d}.jsonl").write_text("".join(_line(number, step) for step in range(1, STEPS + 1)))
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "rankscope", "import", str(logs), "--store", str(store)], stdout=subprocess.PIPE
        )
        summary = process.stdout.read().decode().splitlines()[-1] if process.stdout else ""
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        if status:
            raise SystemExit(f"the import failed with status {status}")
        files, commits = len(list(store.glob("dataset=*/**/*.parquet"))), len(list(store.glob("_delta_log/*.json")))
    return [
        Row(f"{count:,} logs: elapsed", seconds, "s", summary),
        Row(f"{count:,} logs: CPU time", usage.ru_utime + usage.ru_stime, "s", "with the start of the command"),
        Row(f"{count:,} logs: data files", files, "files", f"{commits:,} commits"),
        Row(f"{count:,} logs: peak resident memory", usage.ru_maxrss / 1024, "MiB", ""),
    ]


def _line(number: int, step: int) -> str:
    return json.dumps({"step": step, "loss": number + 1 / step, "learning_rate": 1e-3}) + "\n"


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run(tuple(map(int, sys.argv[1:])) or COUNTS))
