"""What a loss of power may leave of the log: an entry or a checkpoint cut anywhere. It is told, and moved away.

Nothing that was acknowledged is gone with it.
"""

from __future__ import annotations

import os
import shutil

import pytest

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.errors import TornLogError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.connection import connect
from rankscope_storage.log.checkpoints import write_checkpoint
from rankscope_storage.log.delta import Log
from rankscope_storage.log.entries import LOG_FOLDER
from rankscope_storage.maintenance import compaction, compaction_plan
from rankscope_storage.maintenance.check import check
from rankscope_storage.maintenance.file_check import Fault
from rankscope_storage.maintenance.repair import repair


def newest(root, pattern="*.json"):
    return max((root / LOG_FOLDER).glob(pattern))


def count(root):
    with connect(root) as connection:
        return connection.sql("SELECT count(*) FROM scalars").fetchall()[0][0]


def cuts(whole: bytes) -> list[int]:
    """All lengths where a line ends, and beside; with `make test-crashes`, all lengths there are."""
    if os.environ.get("RANKSCOPE_CRASHES"):
        return list(range(1, len(whole)))
    ends = [place for place, byte in enumerate(whole) if byte == ord("\n")]
    lengths = {length for end in ends for length in (end - 1, end, end + 1)} | set(range(1, len(whole), 401))
    return sorted(length for length in lengths if length < len(whole.rstrip()))


def test_an_append_cut_at_any_length_is_never_taken_for_a_commit(store, writer, scalars):
    """Behind the rows come the watermarks: without one of them, what was stored would be stored again."""
    rows = {"scalars": scalars(range(3)), "events": scalars(range(2)).select(["run", "incarnation", "seq", "step"])}
    rows["events"] = rows["events"].append_column("type", [["note", "note"]])
    writer.append(Batch(tables=rows, watermarks={"i0": 2, "i1": 7}))
    entry = newest(store.root)
    whole = entry.read_bytes()

    assert len(whole.splitlines()) == 1 + 2 + 3
    for length in cuts(whole):
        entry.write_bytes(whole[:length])
        with pytest.raises(TornLogError):
            Log.open(store.root, sync_to_disk)
        assert not check(store.root).is_intact, length
    entry.write_bytes(whole)

    assert check(store.root).is_intact


def test_a_compaction_cut_at_any_length_takes_no_file_away(left, monkeypatch):
    """It names what goes before what comes: cut between, it would leave nothing."""
    monkeypatch.setattr(compaction_plan, "SMALL_FILES", 1)
    compaction.compact(left, sync_to_disk)
    entry = newest(left)
    whole = entry.read_bytes()
    for length in cuts(whole):
        entry.write_bytes(whole[:length])
        with pytest.raises(TornLogError, match="rankscope store repair"):
            Log.open(left, sync_to_disk)
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for number, length in enumerate(ends[:-1]):
        copy = left.with_name(f"copy-{number}")
        shutil.copytree(left, copy)
        newest(copy).write_bytes(whole[:length])

        assert entry.name == repair(copy, sync_to_disk).torn_entry
        assert 15 == count(copy)


def test_an_entry_that_does_not_say_how_long_it_is_is_taken_as_it_is(left):
    """As others write it, and we did."""
    entry = newest(left)
    entry.write_bytes(entry.read_bytes().replace(b"rankscopeActions", b"somebodyElse"))

    assert check(left).is_intact


@pytest.mark.parametrize("kept", [0, 1, 1000, -1])
def test_a_torn_checkpoint_is_moved_away_and_all_is_read_from_the_entries(left, batch, kept):
    write_checkpoint(left, sync_to_disk)
    checkpoint = newest(left, "*.checkpoint.parquet")
    checkpoint.write_bytes(checkpoint.read_bytes()[:kept])
    with pytest.raises(TornLogError, match="rankscope store repair"):
        Store.open(left)

    assert [Fault.TORN_LOG] == [finding.fault for finding in check(left).findings]
    assert checkpoint.name == repair(left, sync_to_disk, dry_run=True).torn_checkpoint
    assert checkpoint.name == repair(left, sync_to_disk).torn_checkpoint
    assert not repair(left, sync_to_disk).changed
    assert check(left).is_intact
    with Store.open(left).claim(owner="next") as writer:
        assert 4 == writer.watermark("i0")

        writer.append(batch(range(5, 8), incarnation="new"))

    assert 18 == count(left)


def test_a_checkpoint_that_is_named_and_not_there_is_forgotten(left):
    write_checkpoint(left, sync_to_disk)
    newest(left, "*.checkpoint.parquet").unlink()

    assert not check(left).is_intact
    assert "_last_checkpoint" == repair(left, sync_to_disk).torn_checkpoint
    assert check(left).is_intact
    assert 15 == count(left)
