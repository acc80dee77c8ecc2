"""Spool: cost of a record on disk, compared with a plain write of the same bytes."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from _noise import records
from _rows import Row, print_rows

from rankscope_contract.wire.channel import Registration
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.publish.ring import EncodedRecord, encode, stream
from rankscope_exporter.publish.spool import Spool, SpoolWriter, needed_plans

STEPS, PAIRS = 100, 7
WHO = Registration(
    run="bench", rank=0, world_size=1, local_rank=0, host="h", pid=1, incarnation="bench", launch_id="bench", url=""
)


def run() -> list[Row]:
    return [row for tensors in (150, 2_500) for row in _of(tensors)]


def _of(tensors: int) -> list[Row]:
    published = records(tensors, STEPS)
    made = list(map(encode, published))
    messages = [bytes(stream(seq, [record])) for seq, record in enumerate(made)]
    size = sum(map(len, messages))
    ours, plain, encoding = [], [], []
    for _ in range(PAIRS):  # in turns, so that the machine's mood falls on all of them
        ours.append(_spooled(made, sync=False))
        plain.append(_plain(messages))
        encoding.append(_timed(lambda: list(map(encode, published))))
    waited = statistics.median(_handed_over(made) for _ in range(PAIRS))
    synced = _spooled(made, sync=True)
    cpu = statistics.median(pair[0] for pair in ours)
    note = f"{size / STEPS / 1e3:.3g} kB a step on disk"
    floor = statistics.median(pair[0] for pair in plain)
    return [
        Row(f"{tensors:,} tensors: CPU", 1e3 * cpu / STEPS, "ms per step", note),
        Row(
            f"{tensors:,} tensors: encoding",
            1e3 * _median(encoding) / STEPS,
            "ms per step",
            "once, for ring, spool and polls",
        ),
        Row(
            f"{tensors:,} tensors: publisher waits",
            1e3 * waited / STEPS,
            "ms per step",
            "wall, for the thread that writes",
        ),
        Row(f"{tensors:,} tensors: plain write", 1e3 * floor / STEPS, "ms per step", "CPU, the same bytes"),
        Row(f"{tensors:,} tensors: rate", size / 1e6 / statistics.median(pair[1] for pair in ours), "MB/s", "wall"),
        Row(
            f"{tensors:,} tensors: plain rate",
            size / 1e6 / statistics.median(pair[1] for pair in plain),
            "MB/s",
            "wall",
        ),
        Row(
            f"{tensors:,} tensors: with spool_sync", 1e3 * synced[1] / STEPS, "ms per step", "wall, waits for the disk"
        ),
        Row(f"{tensors:,} tensors: reading back", size / 1e6 / _read(made), "MB/s", "checked, wall"),
    ]


def _median(pairs: list[tuple[float, float]]) -> float:
    return statistics.median(pair[0] for pair in pairs)


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return CPU seconds of this thread and wall seconds."""
    cpu, wall = time.thread_time(), time.perf_counter()
    work()
    return time.thread_time() - cpu, time.perf_counter() - wall


def _spooled(made: list[EncodedRecord], *, sync: bool) -> tuple[float, float]:
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))  # a temporary folder may be memory: no place for a spool
    spool = Spool(str(folder), "bench", max_bytes=1 << 30, sync=sync)
    try:
        spool.open(WHO)
        spool.append(0, made[0])  # the plan is written once
        return _timed(lambda: [spool.append(seq + 1, record) for seq, record in enumerate(made)])
    finally:
        spool.close()
        shutil.rmtree(folder)


def _handed_over(made: list[EncodedRecord]) -> float:
    """Return the seconds that a publisher waits for all of them."""
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    writer = SpoolWriter(Spool(str(folder), "bench", max_bytes=1 << 30), lambda: WHO, on_fault=_fail, meter=CpuMeter())
    try:
        writer.write(0, made[0])
        return _timed(lambda: [writer.write(seq + 1, record) for seq, record in enumerate(made)])[1]
    finally:
        writer.close()
        shutil.rmtree(folder)


def _fail(where: str, error: BaseException) -> None:
    raise RuntimeError(where) from error


def _plain(messages: list[bytes]) -> tuple[float, float]:
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
        return _timed(lambda: [os.write(file.fileno(), message) for message in messages])


def _read(made: list[EncodedRecord]) -> float:
    """Return the seconds it takes to read all of them back as a service does."""
    from rankscope_contract.wire.spool import SpoolReader

    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    spool = Spool(str(folder), "bench", max_bytes=1 << 30)
    try:
        spool.open(WHO)
        for seq, record in enumerate(made):
            spool.append(seq, record)
        reader = SpoolReader(spool.folder, pa, needed_plans)

        def read() -> None:
            cursor = -1
            while (stretch := reader.after(cursor, 8_388_608)) is not None:
                cursor = stretch.last

        return _timed(read)[1]
    finally:
        spool.close()
        shutil.rmtree(folder)


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
