"""Bytes of a stored sample of a real training: a GPT of 12 layers under DDP that a service polls.

    python benchmarks/run.py stored_training

The noise is that of the training, while `stored_bytes` uses random walks with equal entropy for all series. Replicas
publish equal rows: weights, averaged gradients and optimizer state are equal on all ranks. So the rows of one rank, and
each kind of them, are also written into separate files. Six samples per row are counted, as in `stored_bytes`. The two
baselines that rules add here are left out of these files and of the flushed bytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from _fleet_service import Service
from _rows import Row, print_rows
from _stored_size import bytes_per_sample, dearest, prototype, stored_files

from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import conform
from rankscope_storage.files.encoding import read_file, write_file

RANKS, STEPS, LAYERS, WIDTH = 4, 400, 12, 96
BASELINES: Final = ("norm_baseline", "mean_baseline")
SCRIPT: Final = Path(__file__).parents[1] / "examples" / "gpt_ddp.py"


def run() -> list[Row]:
    folder = Path(tempfile.mkdtemp(prefix="rankscope-training-"))
    try:
        flushed = stored_files(_train(folder))
        note = f"{len(flushed)} files of {RANKS} ranks, {STEPS} steps; baselines included"
        rows = [Row("at the flush", bytes_per_sample(flushed), "bytes per sample", note)]
        table = pa.concat_tables([conform(read_file(path, "tensor_stats"), "tensor_stats") for path in flushed])
        rows.append(_in_one_file(folder, "as one file, as merges make them", table))
        one = table.filter(pc.equal(table["rank"], 0))
        rows.append(_in_one_file(folder, "one rank alone", one))
        rows += [
            _in_one_file(folder, f"one rank, {kind} alone", one.filter(pc.equal(one["kind"], kind)))
            for kind in sorted(pc.unique(one["kind"]).to_pylist())
        ]
        return rows
    finally:
        shutil.rmtree(folder)


def _train(folder: Path) -> Path:
    """Train under a service; return its store, which has everything when both have ended."""
    service = Service(folder, {})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [str(SCRIPT), "--no-faults", "--steps", str(STEPS), "--layers", str(LAYERS), "--width", str(WIDTH)]
    command += ["--batch", "4", "--context", "64"]
    environment = {"RANKSCOPE_INGEST_URL": service.url, "RANKSCOPE_RUN": "trained", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    finally:
        said = service.stop()
    if done.returncode:
        raise RuntimeError(f"training failed: {done.stderr[-2000:]}\n{said}")
    return service.store


def _in_one_file(folder: Path, name: str, table: pa.Table) -> Row:
    whole = folder / write_file(folder, "tensor_stats", "p", table, sync_to_disk).path
    for column in BASELINES:
        place = table.column_names.index(column)
        table = table.set_column(place, column, pa.nulls(table.num_rows, table.field(place).type))
    path = folder / write_file(folder, "tensor_stats", "p", table, sync_to_disk).path
    columns = ", ".join(f"{column} {size:.3f}" for column, size in dearest([path])[:5])
    note = f"{table.num_rows:,} rows; by the prototype's writer {prototype([path]):.2f}; "
    note += f"with baselines {bytes_per_sample([whole]):.2f}; a row: {columns}"
    return Row(name, bytes_per_sample([path]), "bytes per sample", note)


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
