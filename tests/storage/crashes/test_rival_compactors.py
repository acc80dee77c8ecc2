"""Two compacting processes, an appending one and a vacuuming one run concurrently: every row is stored once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.storage.appending import RANKS, TENSORS

from rankscope_storage.connection import connect
from rankscope_storage.maintenance.check import check

pytestmark = [
    pytest.mark.skipif(not os.environ.get("RANKSCOPE_CRASHES"), reason="make test-crashes"),
    pytest.mark.timeout(1800),
]

RECORDS = 400

COMPACTOR = """
import sys
from pathlib import Path
from rankscope_storage.maintenance import compaction
from rankscope_storage.base.fsync import sync_to_disk
compaction.SMALL_FILES = 3
merged = refused = 0
print("begun", flush=True)
while not Path(sys.argv[2]).exists():
    report = compaction.compact(Path(sys.argv[1]), sync_to_disk)
    merged, refused = merged + report.files_removed, refused + report.refused
print(merged, refused)
"""
VACUUM = """
import sys, time
from pathlib import Path
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.maintenance.vacuum import maintain
rounds = 0
print("begun", flush=True)
while not Path(sys.argv[2]).exists():
    maintain(Path(sys.argv[1]), sync_to_disk)
    rounds += 1
print(rounds, 0)
"""


def test_concurrent_compactors_vacuum_and_appends_keep_every_row_once(store, tmp_path):
    done = tmp_path / "done"
    arguments = [str(store.root), str(done)]
    rivals = [
        subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
        for code in (COMPACTOR, COMPACTOR, VACUUM)
    ]
    try:
        for rival in rivals:
            assert "begun\n" == rival.stdout.readline()
        appending = [sys.executable, "-m", "tests.storage.appending", str(store.root), str(RECORDS)]
        appender = subprocess.run(appending, stdout=subprocess.DEVNULL, check=False, timeout=600)
    finally:
        done.touch()
    told = [tuple(map(int, rival.communicate(timeout=120)[0].split())) for rival in rivals]
    key = "incarnation, seq, kind, tensor"
    with connect(store.root) as connection:
        found = connection.sql(f"SELECT count(*), count(DISTINCT ({key})) FROM tensor_stats").fetchall()
        scalars = connection.sql("SELECT count(*), count(DISTINCT (incarnation, seq)) FROM scalars").fetchall()

    print(f"files merged and merges refused by each compactor, rounds of clean-up: {told}")
    assert [0, 0, 0, 0] == [appender.returncode, *(rival.returncode for rival in rivals)]
    assert [(RECORDS * RANKS * TENSORS,) * 2] == found
    assert [(RECORDS * RANKS,) * 2] == scalars
    assert all(merged for merged, _ in told[:2])
    assert sum(refused for _, refused in told[:2]) > 0
    assert check(store.root, deep=True).is_intact
