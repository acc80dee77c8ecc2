"""Each operation, killed at calls that change the store (all in `make test-crashes`): no row is lost or doubled."""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.storage.crashes.killing import Killer
from tests.storage.crashes.operations import OPERATIONS, RANKS, RECORDS, UNREADABLE

from rankscope_storage.connection import connect
from rankscope_storage.maintenance.check import check

ROWS = {"scalars": 1, "tensor_stats": 2}  # Rows of a record in each dataset

TIERS = (("scalars", "scalar_rollups"), ("tensor_stats", "tensor_rollups"))
"""Datasets that change together in one commit."""

ONE_COMMIT = ("rename", "remove", "join", "upgrade", "copy")  # Operations that change all datasets in one commit

A_FEW = [("append", 24), ("compact", 10)]


@pytest.fixture(scope="session")
def killer(tmp_path_factory, require_server) -> Iterator[Killer]:
    """Return the process; it needs a C compiler, because the preloaded library that kills is compiled here."""
    require_server("gcc", "g++")
    made = Killer(tmp_path_factory.mktemp("killer"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def before(killer, tmp_path_factory):
    """Return the store before an operation, its rows, and its rows after the operation."""
    made = {}

    def prepared(operation):
        if operation not in made:
            root = tmp_path_factory.mktemp("before") / "store"
            killer.prepare(operation, root)
            done = root.with_name("done")
            copy(root, done)
            killer.live(operation, done, 0)
            made[operation] = root, {} if operation in UNREADABLE else killer.content(root), killer.content(done)
        return made[operation]

    return prepared


def copy(source, target):
    if source.exists():
        shutil.copytree(source, target)


def die(killer, before, operation, at, root):
    """Kill `operation` at one call and check the store; return whether there was such a call."""
    begun, old, new = before(operation)
    copy(begun, root)
    life = killer.live(operation, root, at)
    after = killer.after(operation, root)
    where = f"{operation}, call {at}: {life.calls[-1] if life.calls else ''}"

    check_outcome(operation, old, new, max([0, *life.acknowledged]), after, where)
    shutil.rmtree(root)
    return life.killed


def check_outcome(operation, old, new, acknowledged, after, where):
    """Check the store after a kill, and after the operation was repeated."""
    assert after["whole"], where
    if operation in ("create", "append"):
        check_records(after["found"], acknowledged, where)
    elif operation == "import":
        check_logs(after["found"], old, new, where)
    else:
        check_tiers(after["found"], old, new, where)
    if operation in ONE_COMMIT:
        assert after["found"] in (old, new), where
    assert new == after["redone"], where
    assert RECORDS == after["watermark"], where
    assert after["whole in the end"], where
    assert [] == after["left"], where
    assert {name: len(new.get(name, [])) + RANKS * count for name, count in ROWS.items()}.items() <= after[
        "rows"
    ].items()


def check_records(found, acknowledged, where):
    """Check that all records up to a seq exist, once and in all datasets, including all acknowledged ones."""
    stored = 1 + max((row["seq"] for row in found.get("scalars", [])), default=-1)
    assert acknowledged <= stored, where
    for name, count in ROWS.items():
        keys = sorted((row["rank"], row["seq"]) for row in found.get(name, []))
        records = itertools.product(range(RANKS), range(stored))
        assert sorted(key for key in records for _ in range(count)) == keys, where


def check_tiers(found, old, new, where):
    """Check that each commit of the operation is visible completely or not at all."""
    for tier in TIERS:
        states = [[content.get(name, []) for name in tier] for content in (old, new, found)]
        assert states[2] in states[:2], where


def check_logs(found, old, new, where):
    """Check that each imported log is stored completely, with its event and its run, or not at all."""
    runs = {row["run"] for rows in new.values() for row in rows}
    for run in runs:
        states = [
            {name: [row for row in rows if row["run"] == run] for name, rows in content.items()}
            for content in (old, new, found)
        ]
        kept = [{name: rows for name, rows in state.items() if rows} for state in states]
        assert kept[2] in kept[:2], where


@pytest.mark.parametrize(("operation", "at"), A_FEW)
def test_kill_at_some_calls_neither_loses_nor_doubles_rows(killer, before, tmp_path, operation, at):
    assert die(killer, before, operation, at, tmp_path / "store")


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not os.environ.get("RANKSCOPE_CRASHES"), reason="make test-crashes")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_kill_at_every_call_neither_loses_nor_doubles_rows(killer, before, tmp_path, operation):
    moments = itertools.takewhile(lambda at: die(killer, before, operation, at, tmp_path / f"{at}"), itertools.count(1))

    points = len(list(moments))
    print(f"{operation}: killed at {points} points")
    assert points > 4


# Two compacting processes, an appending one and a vacuuming one run concurrently: every row is stored once.

APPENDED = 400

APPENDER = """
import sys
from pathlib import Path
from tests.storage.crashes.operations import append, silent
append(Path(sys.argv[1]), silent, records=int(sys.argv[2]))
"""
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


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not os.environ.get("RANKSCOPE_CRASHES"), reason="make test-crashes")
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
        command = [sys.executable, "-c", APPENDER, str(store.root), str(APPENDED)]
        appender = subprocess.run(command, check=False, timeout=600)
    finally:
        done.touch()
    told = [tuple(map(int, rival.communicate(timeout=120)[0].split())) for rival in rivals]
    key = "incarnation, seq, kind, tensor"
    with connect(store.root) as connection:
        found = connection.sql(f"SELECT count(*), count(DISTINCT ({key})) FROM tensor_stats").fetchall()
        scalars = connection.sql("SELECT count(*), count(DISTINCT (incarnation, seq)) FROM scalars").fetchall()

    print(f"files merged and merges refused by each compactor, rounds of clean-up: {told}")
    assert [0, 0, 0, 0] == [appender.returncode, *(rival.returncode for rival in rivals)]
    assert [(APPENDED * RANKS * ROWS["tensor_stats"],) * 2] == found
    assert [(APPENDED * RANKS,) * 2] == scalars
    assert all(merged for merged, _ in told[:2])
    assert sum(refused for _, refused in told[:2]) > 0
    assert check(store.root, deep=True).is_intact
