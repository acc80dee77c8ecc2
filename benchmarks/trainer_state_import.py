"""Import of a 200 MB trainer_state.json: peak memory, time and rate; reading alone compared with json.load."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from _rows import Row, print_rows

MEGABYTES = 200
_ENTRIES_A_CHUNK = 1000

_MEASURED = """
import json, resource, sys, time
from pathlib import Path
path, store = Path(sys.argv[1]), Path(sys.argv[2])
began, cpu = time.perf_counter(), time.process_time()
{work}
print(json.dumps([time.perf_counter() - began, time.process_time() - cpu,
    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, count]))
"""
_IMPORT = """
from rankscope_ingest.importers import find_importer, import_records
from rankscope_storage.api.store import Store
with Store.open(store, create=True).claim(owner="bench") as writer:
    count = import_records(path, writer, find_importer(path), run="bench").records
"""
_READ = """
from rankscope_ingest.importers import Faults, ImportedBlock, find_importer
blocks = find_importer(path).read(path, Faults())
count = sum(block.records for block in blocks if isinstance(block, ImportedBlock))
"""
_LOAD = """
with path.open() as file:
    count = len(json.load(file)["log_history"])
"""


def run() -> list[Row]:
    folder = Path(tempfile.mkdtemp())
    try:
        path = folder / "trainer_state.json"
        entries = _write_state(path)
        size = path.stat().st_size / 1e6
        return [
            Row("size", size, "MB", f"{entries:,} entries"),
            *_rows("import into a store", _IMPORT, path, size),
            *_rows("reading into columns", _READ, path, size),
            *_rows("json.load", _LOAD, path, size),
        ]
    finally:
        shutil.rmtree(folder)


def _rows(what: str, work: str, path: Path, size: float) -> list[Row]:
    seconds, cpu, peak, count = _measure(work, path)
    return [
        Row(f"{what}: peak resident memory", peak, "MiB", f"{count:,} entries"),
        Row(f"{what}: wall time", seconds, "s", f"{size / seconds:,.1f} MB/s"),
        Row(f"{what}: CPU time", cpu, "s", f"{size / cpu:,.1f} MB/s a core"),
    ]


def _measure(work: str, path: Path) -> tuple[float, float, float, int]:
    program = _MEASURED.format(work=work)
    store = path.parent / f"store-{len(list(path.parent.iterdir()))}"
    done = subprocess.run(
        [sys.executable, "-c", program, str(path), str(store)], check=True, stdout=subprocess.PIPE, text=True
    )
    seconds, cpu, peak, count = json.loads(done.stdout)
    return seconds, cpu, peak, count


def _write_state(path: Path) -> int:
    """Write what the Trainer would, indented as it does, with an evaluation and a NaN now and then."""
    entries = 0
    with path.open("w") as file:
        file.write('{\n  "best_metric": null,\n  "global_step": 0,\n  "log_history": [\n')
        while file.tell() < MEGABYTES * 1_000_000:
            for _ in range(_ENTRIES_A_CHUNK):
                entries += 1
                file.write(",\n" if entries > 1 else "")
                file.write(json.dumps(_entry(entries), indent=2))
        file.write('\n  ],\n  "max_steps": 100000000\n}\n')
    return entries


def _entry(number: int) -> dict[str, float]:
    common = {"epoch": number / 7777, "step": 10 * number}
    if number % 500 == 0:
        return {**common, "eval_loss": 2.0 + 1 / number, "eval_runtime": 12.5, "eval_samples_per_second": 80.1}
    norm = float("nan") if number % 9973 == 0 else 1.0 + 1 / number
    return {**common, "grad_norm": norm, "learning_rate": 1e-5 / number, "loss": 2.0 + 1 / number}


if __name__ == "__main__":
    print_rows(__doc__ or "", run())
