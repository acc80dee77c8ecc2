"""Bytes and CPU of a stored sample: lossless and rounded, at the flush and after a merge, and by column.

    python benchmarks/run.py stored_bytes

Six samples a row are counted (norm, min, max, mean, nans, zeros); infs and numel, which never change here, are not, and
names, step and time are in the bytes of the six. `_noise.six_statistics` describes the noise. The bytes depend on the
range of the scales of the tensors, because their leading digits share a code. So noise with one scale is measured too.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
from _noise import SIX, plan_of, six_statistics
from _rows import Row, cpu_seconds, print_rows
from _stored_size import bytes_per_sample, dearest, prototype, stored_files

from rankscope_exporter.publish.ring import encode, stream
from rankscope_ingest.record_channel.bodies import PlanColumns, RowContext, check, decode
from rankscope_ingest.record_channel.client import open_stream
from rankscope_storage.api.store import Store
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import conform
from rankscope_storage.files.encoding import write_file
from rankscope_storage.maintenance import compaction
from rankscope_storage.maintenance.compaction import CompactionReport
from rankscope_storage.writer.writer import Batch, Writer

TENSORS, RANKS, STEPS_A_FLUSH, FLUSHES = 2_500, 8, 10, 8
BITS = 12
PROTOTYPE = 2.06


def run() -> list[Row]:
    folder = Path(tempfile.mkdtemp(prefix="rankscope-bytes-"))
    try:
        batches = list(_batches())
        return [
            *_store(folder / "lossless", "lossless", batches, None),
            *_store(folder / "level", "lossless, tensors of one scale", _batches(scales=0.0), None),
            *_store(folder / "rounded", f"{BITS} bits of mantissa", batches, BITS),
            *_cpu(folder, batches[: 50 // STEPS_A_FLUSH]),
        ]
    finally:
        shutil.rmtree(folder)


def _batches(scales: float = 2.0) -> Iterable[pa.Table]:
    """Return what the flushes hold, as it comes off the wire; the logarithms of scales lie `scales` apart."""
    walks = [six_statistics(TENSORS, rank, scales=scales) for rank in range(RANKS)]
    contexts = [RowContext(run="bench", attempt=0, rank=rank, incarnation=f"{rank:032x}") for rank in range(RANKS)]
    plans = {plan_of(TENSORS).hash: PlanColumns(plan_of(TENSORS).plan)}
    for flush in range(FLUSHES):
        first, bodies = flush * STEPS_A_FLUSH, []
        for rank, walk in enumerate(walks):
            body = stream(first, list(map(encode, itertools.islice(walk, STEPS_A_FLUSH)))).to_pybytes()
            ordinal = 1_770_000_000_000_000 + first * 500_000 + rank * 1_000
            bodies.append(check(open_stream(body), plans, contexts[rank], after=first - 1, first_ordinal=ordinal))
        yield decode(bodies)["tensor_stats"]


def _store(root: Path, name: str, batches: Iterable[pa.Table], bits: int | None) -> Iterable[Row]:
    last = STEPS_A_FLUSH - 1
    with Store.open(root, create=True, mantissa_bits=bits).claim(owner="bench") as writer:
        for number, table in enumerate(batches):
            marks = {f"{rank:032x}": number * STEPS_A_FLUSH + last for rank in range(RANKS)}
            writer.append(Batch(tables={"tensor_stats": table}, watermarks=marks))
        note = f"{RANKS} ranks x {STEPS_A_FLUSH} steps x {TENSORS:,} tensors a file"
        yield Row(f"{name}: at the flush", bytes_per_sample(stored_files(root)), "bytes per sample", note)
        old = set(stored_files(root))
        report = _merged(writer)
        merged = [path for path in stored_files(root) if path not in old]
        assert merged, "nothing was merged"
    note = f"{report.files_removed} files became {report.files_added}"
    yield Row(f"{name}: after a merge", bytes_per_sample(merged), "bytes per sample", note)
    if bits is None:
        note = f"six columns and their tags; {PROTOTYPE} on its own noise"
        yield Row(f"{name}: the same rows by the prototype's writer", prototype(merged), "bytes per sample", note)
    columns = ", ".join(f"{column} {size:.3f}" for column, size in dearest(merged))
    yield Row(f"{name}: a row", len(SIX) * bytes_per_sample(merged), "bytes", columns)


def _merged(writer: Writer) -> CompactionReport:
    """Merge though there are few files."""
    few, compaction.SMALL_FILES = compaction.SMALL_FILES, 2
    try:
        return writer.compact()
    finally:
        compaction.SMALL_FILES = few


def _cpu(folder: Path, batches: Iterable[pa.Table]) -> Iterable[Row]:
    table = pa.concat_tables(batches)
    million = table.num_rows * len(SIX) / 1e6
    seconds = cpu_seconds(
        lambda: write_file(folder, "tensor_stats", "p", conform(table, "tensor_stats"), sync_to_disk), rounds=5
    )
    note = f"{table.num_rows:,} rows: into one piece, in order, as Parquet, on the disk"
    yield Row("writing, six a row", seconds / million, "CPU s per million samples", note)
    eight = seconds / million * len(SIX) / 8
    yield Row("writing, eight a row", eight, "CPU s per million samples", "the same, infs and numel counted too")


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
