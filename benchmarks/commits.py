"""Commits to a growing log: latency of one-row appends during compaction, checkpoints and vacuum, and time to open.

    RANKSCOPE_COMMITS=20000 python benchmarks/run.py commits

Makes 4,000 commits without that, and ends after 4 minutes (for each 4,000) in any case.

Appends follow each other without a pause, while a service waits ten seconds. The clock is accelerated accordingly: a
commit counts as ten seconds, so the log keeps the entries of 360 commits (an hour). Compaction (every 50 commits) and
maintenance (every 180 commits, half an hour) run in a thread during the appends, as in the service. Replaced data files
keep their real age and are not removed. The physical limit is measured between the commits: write 4 kB, fsync, rename,
fsync the folder. A commit needs this twice.
"""

from __future__ import annotations

import datetime as dt
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from _rows import Row, print_rows

from rankscope_storage.api.store import Batch, Store, Writer
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.log import delta as log_module
from rankscope_storage.log.entries import LOG_FOLDER

COMMITS = int(os.environ.get("RANKSCOPE_COMMITS", "4000"))
TIME_LIMIT_SECONDS = float(os.environ.get("RANKSCOPE_COMMITS_SECONDS", "240"))
MARKS = (100, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
COMPACT_EVERY = 50
MAINTAIN_EVERY = 180
SECONDS_PER_COMMIT = 10
FLOOR_EVERY = 20
INCARNATION = "0" * 32


def run() -> list[Row]:
    # The same acceleration for the entries that delta-rs removes when it writes a checkpoint.
    log_module._CONFIGURATION["delta.deletedFileRetentionDuration"] = "interval 30 seconds"  # noqa: SLF001 - a clock
    folder = Path(tempfile.mkdtemp(prefix="rankscope-commits-"))
    try:
        return list(_commits(folder))
    finally:
        shutil.rmtree(folder)


def _commits(folder: Path) -> Iterator[Row]:
    store = Store.open(folder / "store", create=True)
    seconds: list[float] = []
    floors: list[float] = []
    began, cpu, since = time.monotonic(), time.process_time(), 0
    with store.claim("0/1", owner="bench") as writer, _Upkeep(writer, store.root) as upkeep:
        while len(seconds) < COMMITS and time.monotonic() - began < TIME_LIMIT_SECONDS * max(1, COMMITS / 4000):
            seconds.append(_seconds(lambda: writer.append(_loss(len(seconds)))))
            upkeep.after(len(seconds))
            if len(seconds) % FLOOR_EVERY == 0:
                floors.append(_seconds(lambda: _floor(folder)))
            if len(seconds) in MARKS or len(seconds) == COMMITS:
                spent = (time.process_time() - cpu) / (len(seconds) - since)
                yield from _figures(len(seconds), seconds[since:], floors, spent)
                yield from _opening(store.root, len(seconds))
                floors.clear()
                since, cpu = len(seconds), time.process_time()
    yield Row("commits made", len(seconds), "", f"in {time.monotonic() - began:.0f} s, upkeep failed {upkeep.failed}x")
    yield Row("entries and checkpoints in the log at the end", len(list((store.root / LOG_FOLDER).iterdir())), "files")
    with connect(store.root) as connection:
        stored = connection.sql("SELECT count(*), count(DISTINCT seq) FROM scalars").fetchall()
        assert [(len(seconds), len(seconds))] == stored


def _figures(number: int, seconds: list[float], floors: list[float], cpu: float) -> Iterator[Row]:
    median, high = np.percentile(seconds, (50, 95)) * 1000
    floor, floor_high = np.percentile(floors, (50, 95)) * 1000
    note = f"the {len(seconds):,} commits before; {1000 * cpu:.1f} ms CPU each, upkeep included"
    yield Row(f"commit at {number:,}, median", median, "ms", note)
    yield Row(f"commit at {number:,}, 95th percentile", high, "ms", f"load {os.getloadavg()[0]:.1f}")
    yield Row(f"commit at {number:,}, longest", 1000 * max(seconds), "ms")
    yield Row(f"floor at {number:,}, median", floor, "ms", f"95th percentile {floor_high:.1f} ms")


def _opening(root: Path, number: int) -> Iterator[Row]:
    yield Row(f"open at {number:,}", _median_of_5(lambda: Store.open(root)), "ms", "Store.open, median of 5")
    yield Row(f"connect at {number:,}", _median_of_5(lambda: connect(root).close()), "ms", "rankscope.connect")


class _Upkeep:
    """Compaction and maintenance when they are due, one at a time, in a thread, as the service has them."""

    def __init__(self, writer: Writer, root: Path) -> None:
        self._writer = writer
        self._root = root
        self._thread = ThreadPoolExecutor(1)
        self._compacted_at = self._maintained_at = 0
        self._work: Future[object] | None = None
        self.failed = 0

    def after(self, commits: int) -> None:
        """Start the work that is due after this number of commits, unless the thread is busy."""
        if self._work is not None and not self._work.done():
            return
        self._note()
        if commits - self._compacted_at >= COMPACT_EVERY:
            self._compacted_at = commits
            self._work = self._thread.submit(self._writer.compact)
        elif commits - self._maintained_at >= MAINTAIN_EVERY:
            self._maintained_at = commits
            _age(self._root / LOG_FOLDER)
            self._work = self._thread.submit(self._writer.maintain)

    def _note(self) -> None:
        if self._work is not None and self._work.exception() is not None:
            self.failed += 1
        self._work = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        self._note()


def _age(folder: Path) -> None:
    """Give each file of the log the age that it would have at a commit every ten seconds."""
    named = [(int(path.name[:20]), path) for path in folder.iterdir() if path.name[:20].isdecimal()]
    newest, now = max(version for version, _ in named), time.time()
    for version, path in named:
        moment = now - (newest - version) * SECONDS_PER_COMMIT
        os.utime(path, (moment, moment))


def _floor(folder: Path) -> None:
    staged, final = folder / "floor.new", folder / "floor"
    staged.write_bytes(b"x" * 4096)
    sync_to_disk(staged)
    staged.rename(final)
    sync_to_disk(folder)


def _loss(seq: int) -> Batch:
    row = {
        "run": "run",
        "attempt": 0,
        "rank": 0,
        "incarnation": INCARNATION,
        "seq": seq,
        "ordinal": seq,
        "step": seq,
        "ts": dt.datetime.now(tz=dt.UTC),
        "ts_origin": "rank",
        "name": "loss",
        "value": 1.0 / (1 + seq),
    }
    table = pa.Table.from_pylist([row], schema=dataset_schema("scalars"))
    return Batch(tables={"scalars": table}, watermarks={INCARNATION: seq})


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _median_of_5(work: Callable[[], object]) -> float:
    return 1000 * float(np.median([_seconds(work) for _ in range(5)]))


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
