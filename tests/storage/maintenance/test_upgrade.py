"""A store of schema version 1 is converted once, and then answers all views as the release that wrote it."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rankscope_storage.api.store import Store
from rankscope_storage.base.errors import ConflictError, SchemaVersionError, ShardLockError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.connection import connect
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.log.shard_lock import ShardLock, shard_numbers
from rankscope_storage.maintenance import upgrade as module
from rankscope_storage.maintenance.check import check
from rankscope_storage.maintenance.upgrade import upgrade

STORE_1 = Path(__file__).parents[1] / "data" / "store_1"
"""Ranks with jumps of their clocks, two attempts and rollups, and logs: with epochs, with and without steps."""
ANSWERS = STORE_1.parents[2] / "golden" / "store_1.txt"
"""Answers of f5ca044e. Times with the jumps of a clock are null, except in views without jumps."""

CURVE = "WITH c AS (FROM loss_curve WHERE run = 'clock') "
JUMPED = "clock"  # the run whose clocks jump
TIMES = ("ts", "first_ts")
UNCHANGED = ("clock_jumps", "run_eta", "goodput", "goodput_attempts", "attempts", "runs")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORE_1, tmp_path / "history"))


def expected_answers() -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each query with its columns and the sorted texts of its rows."""
    lines = ANSWERS.read_text().splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith("{")]
    for begin, end in zip(begins, [*begins[1:], len(lines)], strict=True):
        head = json.loads(lines[begin])
        yield head["query"], head["columns"], lines[begin + 1 : end]


def text_of(query: str, row: dict[str, Any]) -> str:
    has_times = "without" in query or query.removesuffix("_history") in UNCHANGED
    hidden = () if has_times or row.get("run") != JUMPED else TIMES
    return json.dumps([None if name in hidden else plain(value) for name, value in row.items()], separators=(",", ":"))


def plain(value: object) -> object:
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).isoformat()
    return float(f"{value:.9g}") if isinstance(value, float) else value


@pytest.mark.parametrize("is_raced", [False, True])
def test_every_view_and_macro_answers_as_before(root, is_raced, monkeypatch):
    """Another upgrade may run at the same time: a bucket has no locks."""
    genuine = module.write_file

    def write_after_the_other(*arguments, **options):
        monkeypatch.setattr(module, "write_file", genuine)
        assert upgrade(root, sync_to_disk).files == 5
        return genuine(*arguments, **options)

    if is_raced:
        monkeypatch.setattr(module, "write_file", write_after_the_other)

    assert (0 if is_raced else 5) == upgrade(root, sync_to_disk).files
    with connect(root) as connection:
        for query, columns, rows in expected_answers():
            chosen = ", ".join(f'"{name}"' for name in columns) or "*"
            found = connection.query(f"{CURVE if '(c,' in query else ''}SELECT {chosen} FROM {query}")

            assert rows == sorted(text_of(query, row) for row in found.to_pylist()), query
    assert check(root, deep=True).is_intact


def test_store_is_converted_once_and_old_files_remain(root):
    before = {path.name: path.read_bytes() for path in root.rglob("*.parquet")}
    with pytest.raises(SchemaVersionError, match=f"rankscope store upgrade --store {root}`$"):
        connect(root)
    report = upgrade(root, sync_to_disk)
    version = Log.open(root, sync_to_disk).version

    assert (True, 5, 271) == (report.is_converted, report.files, report.rows)
    assert not upgrade(root, sync_to_disk).is_converted
    assert version == Log.open(root, sync_to_disk).version
    assert before.items() <= {path.name: path.read_bytes() for path in root.rglob("*.parquet")}.items()


def test_a_writer_converts_the_store_unless_another_process_writes(root):
    held = ShardLock.take(root, "0/1", "a service")
    alone = "^rankscope store upgrade needs the store for itself: .* locked by a service, which is running: stop it$"
    with pytest.raises(ShardLockError, match=alone):
        Store.open(root).claim("1/2", owner="test")
    held.release()
    with Store.open(root).claim(owner="test"), connect(root) as connection:
        positions = connection.query("SELECT position FROM scalars WHERE run = 'crowded' ORDER BY seq")

    assert [1, 2, 3, 4, 5, 6] == positions["position"].to_pylist()


def test_service_of_an_earlier_release_without_a_lock_is_stopped(root):
    """It runs on another machine. Its next commit has the number of its shard plus one, which the upgrade has taken."""
    older = Log.open(root, sync_to_disk, may_be_older=True)
    numbers = shard_numbers(older)
    upgrade(root, sync_to_disk)
    with pytest.raises(ConflictError, match="another process has changed"):
        older.commit(Change(transactions={name: number + 1 for name, number in numbers.items()}))

    assert numbers


def test_unfinished_upgrade_is_completed_before_any_reader(root):
    log = Log.open(root, sync_to_disk, may_be_older=True)
    log.begin_upgrade()
    with pytest.raises(SchemaVersionError, match="rankscope store upgrade"):
        connect(root)

    assert upgrade(root, sync_to_disk).files == 5
    assert Log.open(root, sync_to_disk).is_current


def test_only_files_with_other_positions_have_the_column(root):
    upgrade(root, sync_to_disk)
    with connect(root) as connection:
        files = connection.files("scalars")
        stored = {"position" in pq.read_schema(path).names for path in files}

    assert {True, False} == stored
