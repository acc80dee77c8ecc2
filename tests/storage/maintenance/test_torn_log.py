"""The log after a power failure: a truncated entry or checkpoint is reported and moved away.

No acknowledged row is lost.
"""

import os
import shutil

import pytest
from tests.storage.rows import ask, entries, table

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.errors import TornLogError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.log.checkpoints import write_checkpoint
from rankscope_storage.log.delta import Log
from rankscope_storage.log.entries import LOG_FOLDER
from rankscope_storage.maintenance import compaction
from rankscope_storage.maintenance.check import FindingKind, check
from rankscope_storage.maintenance.repair import repair

COUNT = "SELECT count(*) FROM scalars"


def cuts(whole: bytes) -> list[int]:
    """Return all lengths at and next to the end of a line; with `make test-crashes`, all lengths."""
    if os.environ.get("RANKSCOPE_CRASHES"):
        return list(range(1, len(whole)))
    ends = [place for place, byte in enumerate(whole) if byte == ord("\n")]
    lengths = {length for end in ends for length in (end - 1, end, end + 1)} | set(range(1, len(whole), 401))
    return sorted(length for length in lengths if length < len(whole.rstrip()))


def test_append_entry_truncated_anywhere_is_never_read_as_a_commit(store, writer, scalars):
    """The watermarks follow the rows: without one of them, stored rows would be stored again."""
    events = table("events", [{"seq": seq} for seq in range(2)], run="r", incarnation="i0", type="note")
    writer.append(Batch(tables={"scalars": scalars(range(3)), "events": events}, watermarks={"i0": 2, "i1": 7}))
    entry = entries(store.root)[-1]
    whole = entry.read_bytes()

    assert len(whole.splitlines()) == 1 + 2 + 3
    for length in cuts(whole):
        entry.write_bytes(whole[:length])
        with pytest.raises(TornLogError):
            Log.open(store.root, sync_to_disk)
        assert not check(store.root).is_intact, length
    entry.write_bytes(whole)

    assert check(store.root).is_intact


def test_compaction_entry_truncated_anywhere_removes_no_file(left, monkeypatch):
    """It lists removed files before added ones: truncated between them, it would leave no rows."""
    monkeypatch.setattr(compaction, "SMALL_FILES", 1)
    compaction.compact(left, sync_to_disk)
    entry = entries(left)[-1]
    whole = entry.read_bytes()
    for length in cuts(whole):
        entry.write_bytes(whole[:length])
        with pytest.raises(TornLogError, match="rankscope store repair"):
            Log.open(left, sync_to_disk)
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for number, length in enumerate(ends[:-1]):
        copy = left.with_name(f"copy-{number}")
        shutil.copytree(left, copy)
        entries(copy)[-1].write_bytes(whole[:length])

        assert entry.name == repair(copy, sync_to_disk).torn_entry
        assert [(15,)] == ask(copy, COUNT)


def test_entry_without_a_declared_number_of_lines_is_accepted(left):
    """Other writers, and older releases of Rankscope, write such entries."""
    entry = entries(left)[-1]
    entry.write_bytes(entry.read_bytes().replace(b"rankscopeActions", b"somebodyElse"))

    assert check(left).is_intact


@pytest.mark.parametrize("kept", [0, 1000, -1])
def test_torn_checkpoint_is_moved_away_and_entries_are_read(left, batch, kept):
    write_checkpoint(left, sync_to_disk)
    (checkpoint,) = (left / LOG_FOLDER).glob("*.checkpoint.parquet")
    checkpoint.write_bytes(checkpoint.read_bytes()[:kept])
    with pytest.raises(TornLogError, match="rankscope store repair"):
        Store.open(left)

    assert [FindingKind.TORN_LOG] == [finding.kind for finding in check(left).findings]
    assert checkpoint.name == repair(left, sync_to_disk, dry_run=True).torn_checkpoint
    assert checkpoint.name == repair(left, sync_to_disk).torn_checkpoint
    assert not repair(left, sync_to_disk).changed
    assert check(left).is_intact
    with Store.open(left).claim(owner="next") as writer:
        assert 4 == writer.watermark("i0")

        writer.append(batch(range(5, 8), incarnation="new"))

    assert [(18,)] == ask(left, COUNT)


def test_hint_to_a_missing_checkpoint_is_moved_away(left):
    write_checkpoint(left, sync_to_disk)
    for checkpoint in (left / LOG_FOLDER).glob("*.checkpoint.parquet"):
        checkpoint.unlink()
    assert not check(left).is_intact
    assert "_last_checkpoint" == repair(left, sync_to_disk).torn_checkpoint
    assert check(left).is_intact
    assert [(15,)] == ask(left, COUNT)
