"""Part writers of `make test-scale`: four writers and a compactor that are killed, and a reader that polls.

Every snapshot is consistent by its content, and each acknowledged record is stored once.
"""

import os
import random
import subprocess
import sys
import threading
from dataclasses import dataclass, field

import pytest
from tests.scale.writers import RECORDS, WRITERS, Reader, process_of
from tests.storage.crashes.operations import RANKS

from rankscope_storage.api.store import Store
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.maintenance import vacuum
from rankscope_storage.maintenance.check import check

pytestmark = pytest.mark.skipif(not os.environ.get("RANKSCOPE_SCALE"), reason="make test-scale")

KILLS = 5  # of each process


@dataclass(slots=True)
class Rival:
    """A process that is killed KILLS times after a number of its lines, and started again; `end` ends it for good."""

    arguments: list[str]
    lines: list[str] = field(default_factory=list)
    kills: int = 0
    error: str = ""
    ending: threading.Event = field(default_factory=threading.Event)

    def run(self, choice: random.Random) -> None:
        command = [sys.executable, "-m", "tests.scale.writers", *self.arguments]
        while True:
            left = choice.randint(3, RECORDS // (KILLS + 1)) if self.kills < KILLS else -1
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
                for line in process.stdout:
                    self.lines.append(line)
                    left -= 1
                    if not left or self.ending.is_set():
                        process.kill()
                status = process.wait()
                text = process.stderr.read()
            if self.ending.is_set() or not status:
                return
            if status > 0:
                self.error = text
                return
            self.kills += 1


def test_every_snapshot_is_consistent_while_writers_are_killed(bucket, monkeypatch):
    root = f"s3://{bucket}/store"
    store = Store.open(root, create=True)
    choice = random.Random(5)
    writers = [Rival([root, "append", f"{number}"]) for number in range(WRITERS)]
    compactor = Rival([root, "compact"])
    threads = [
        threading.Thread(target=rival.run, args=(random.Random(choice.random()),)) for rival in (*writers, compactor)
    ]
    for thread in threads:
        thread.start()
    reader = Reader(root)
    try:
        while any(thread.is_alive() for thread in threads[:-1]):
            acknowledged = {process_of(n): int(rival.lines[-1]) for n, rival in enumerate(writers) if rival.lines}
            found = reader.records()
            for process, records in acknowledged.items():
                assert all(records <= found[f"{process}{rank}"] for rank in range(RANKS))
    finally:
        compactor.ending.set()
        for thread in threads:
            thread.join(timeout=120)

    assert [""] * (WRITERS + 1) == [rival.error for rival in (*writers, compactor)]
    everything = {f"{process_of(number)}{rank}": RECORDS for number in range(WRITERS) for rank in range(RANKS)}
    assert everything == reader.records()
    merged = sum(int(line.split()[0]) for line in compactor.lines)
    kills = [rival.kills for rival in (*writers, compactor)]
    print(
        f"{reader.versions[-1]} versions, {len(reader.versions)} snapshots read, {kills} kills, {merged} files merged"
    )
    assert reader.versions == sorted(reader.versions)
    assert len(set(reader.versions)) > 20
    assert [KILLS] * WRITERS == kills[:-1]
    assert merged > 100
    monkeypatch.setattr(vacuum, "REMOVED_FILES_HOURS", 0)
    assert vacuum.maintain(store.root, sync_to_disk).data_files >= merged
    assert everything == Reader(root).records()
    assert check(store.root, deep=True).is_intact
