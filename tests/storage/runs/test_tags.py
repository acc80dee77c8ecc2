"""Tags and notes of runs: stored with any order of writers, removable, and independent of the service."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from tests.storage.rows import ask, data_files, files, table

from rankscope_storage.api import summaries
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import conform
from rankscope_storage.connection import connect
from rankscope_storage.files.encoding import write_file
from rankscope_storage.log.delta import Change
from rankscope_storage.maintenance.check import check
from rankscope_storage.maintenance.compaction import compact
from rankscope_storage.runs import edit, tags
from rankscope_storage.runs.tags import TagsAndNote, edit_tags, parse_tags, remove_tags, set_note, set_tags

OLD_STORE = Path(__file__).parents[1] / "data" / "store_without_labels"
MOMENT = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def version(state: str, ordinal: int, run: str = "r") -> Batch:
    """Return the row of a service for a run; `ordinal` is its clock."""
    row = {"run": run, "attempt": 0, "state": state, "ordinal": ordinal, "source_kind": "live"}
    row["ts"] = MOMENT + dt.timedelta(microseconds=ordinal)
    return Batch(tables={"runs": table("runs", [row])}, watermarks={})


def shown(root, columns="state, tags, note", run="r"):
    return ask(root, f"SELECT {columns} FROM runs WHERE run = '{run}'")


@pytest.fixture
def root(store, writer):
    writer.append(version("running", 1))
    return store.root


def test_tags_and_note_are_set_changed_and_removed(root):
    edit_tags(root, "r", set_tags({"team": "ours", "size": "7b"}), sync_to_disk)
    edit_tags(root, "r", set_note("  warm-up too short\nsee r2 "), sync_to_disk)
    after = edit_tags(root, "r", remove_tags(["team"]), sync_to_disk)

    assert TagsAndNote({"size": "7b"}, "warm-up too short\nsee r2") == after
    assert [("running", '{"size":"7b"}', "warm-up too short\nsee r2")] == shown(root)
    edit_tags(root, "r", remove_tags(["size"]), sync_to_disk)
    edit_tags(root, "r", set_note(""), sync_to_disk)
    assert [("running", None, None)] == shown(root)


def test_secrets_in_tags_and_notes_are_masked(root):
    edit_tags(root, "r", set_tags({"hf_token": "correct-horse", "url": "https://bob:correct-horse@host"}), sync_to_disk)
    edit_tags(root, "r", set_note("the password is correct-horse"), sync_to_disk)

    expected = '{"hf_token":"***","url":"https://***@host"}'
    assert [("running", expected, "the password is ***")] == shown(root)


def test_service_writes_its_run_without_removing_tags(root, writer, batch):
    edit_tags(root, "r", set_tags({"keep": "yes"}), sync_to_disk)
    writer.append(batch(range(3)))
    writer.append(version("completed", 2))
    edit_tags(root, "r", set_note("done"), sync_to_disk)

    assert [("completed", '{"keep":"yes"}', "done")] == shown(root)


def test_concurrent_tag_does_not_restore_an_older_state(root, writer):
    """The service stores the end of the run between the read and the commit of the edit."""

    def late(known: TagsAndNote) -> TagsAndNote:
        writer.append(version("failed", 2))
        return set_tags({"a": "1"})(known)

    edit_tags(root, "r", late, sync_to_disk)

    assert [("failed", '{"a":"1"}', None)] == shown(root)


def test_concurrent_edits_of_tags_are_both_stored(root):
    """Both read the same version: the second commit is refused, and repeated on top of the first."""
    others = iter([set_tags({"other": "2"})])

    def mine(known: TagsAndNote) -> TagsAndNote:
        for other in others:
            edit_tags(root, "r", other, sync_to_disk)
        return set_tags({"mine": "1"})(known)

    edit_tags(root, "r", mine, sync_to_disk)

    assert files(root).num_rows == len(data_files(root))  # none of the refused commit
    assert [("running", '{"mine":"1","other":"2"}', None)] == shown(root)


def test_tags_survive_compaction_and_follow_a_renamed_run(root, writer, monkeypatch):
    monkeypatch.setattr("rankscope_storage.maintenance.compaction.SMALL_FILES", 1)
    edit_tags(root, "r", set_tags({"a": "1"}), sync_to_disk)
    writer.append(version("completed", 2))
    compact(root, sync_to_disk)

    assert [("completed", '{"a":"1"}', None)] == shown(root)
    writer.close()
    edit.rename(root, "r", "better", sync_to_disk)

    assert [] == shown(root)
    assert [("completed", '{"a":"1"}', None)] == shown(root, run="better")


def test_clock_set_back_does_not_restore_older_tags(root):
    later = tags._new_version(tags._known(root, "r"), TagsAndNote({"a": "old"}))
    ahead = pa.array([MOMENT.replace(year=2090)], later.schema.field("ts").type)
    later = later.set_column(later.schema.get_field_index("ts"), "ts", ahead)
    file = write_file(root, "runs", "_shared-2090-01-01", conform(later, "runs"), sync_to_disk)
    tags.Log.open(root, sync_to_disk).commit(Change(added=[file]))
    edit_tags(root, "r", set_tags({"a": "new"}), sync_to_disk)

    assert [("running", '{"a":"new"}', None)] == shown(root)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (set_tags({"": "x"}), "not a valid tag key"),
        (set_tags({"a=b": "x"}), "not a valid tag key"),
        (set_tags({"k" * 101: "x"}), "1 to 100 printable"),
        (set_tags({"k": "v" * 1001}), "at most 1000"),
        (set_tags({"k": "a\nb"}), "printable"),
        (set_tags({"k": "\udcff"}), "printable"),
        (set_tags({f"k{n}": "" for n in range(101)}), "at most 100 tags"),
        (remove_tags(["nothing"]), "no tag nothing: it has no tags"),
        (set_note("x" * 10_001), "at most 10000"),
        (set_note("a\x1b[2J"), "printable"),
    ],
)
def test_invalid_tags_and_notes_are_refused(change, complaint):
    with pytest.raises(StoreError, match=complaint):
        change(TagsAndNote())


def test_refused_edit_of_tags_changes_nothing(root, writer, batch):
    writer.append(batch(range(3), run="rows alone", incarnation="i1"))
    with pytest.raises(StoreError, match="not a valid tag key"):
        edit_tags(root, "r", set_tags({"good": "1", "": "x"}), sync_to_disk)
    with pytest.raises(StoreError, match="run 'rows alone' is not registered"):
        edit_tags(root, "rows alone", set_note("x"), sync_to_disk)

    assert [("running", None, None)] == shown(root)


def test_invalid_tags_of_another_program_are_ignored():
    assert [{}] * 6 == [*map(parse_tags, [None, "", "no JSON", "[1]", "3", '{"a": 1}'])]


def test_full_disk_raises_store_error_for_tags(root, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tags, "write_file", full)
    with pytest.raises(StoreError, match=r"cannot write to .*No space left on device"):
        edit_tags(root, "r", set_note("x"), sync_to_disk)


# A store with files that lack these columns.


@pytest.fixture
def old(tmp_path):
    return Path(shutil.copytree(OLD_STORE, tmp_path / "old"))


def test_store_of_a_release_without_tags_is_readable(old):
    """The previous release wrote the files in `tests/storage/data`, which must not change."""
    with connect(old) as connection:
        assert "tags" not in {field.name for field in connection._log._table.schema().fields}
        rows = summaries.runs(connection).to_pylist()

    assert [("completed", None, None)] == shown(old, run="before")
    found = [tuple(row[name] for name in ("run", "last_step", "state", "tags")) for row in rows]
    assert [("before", 2, "completed", None)] == found
    assert check(old, deep=True).is_intact


def test_store_of_a_release_without_tags_accepts_tags_and_rows(old):
    edit_tags(old, "before", set_tags({"kept": "1"}), sync_to_disk)
    with Store.open(old).claim(owner="after") as writer:
        writer.append(version("running", 20, run="after"))

    assert [("completed", '{"kept":"1"}', None)] == shown(old, run="before")
    assert [("running", None)] == shown(old, "state, tags", "after")
    assert [(1.0,), (1 / 2,), (1 / 3,)] == ask(old, "SELECT value FROM scalars ORDER BY step")
    [(config,)] = shown(old, "config", run="before")
    assert ["train.py"] == json.loads(config)["argv"]
    assert check(old, deep=True).is_intact
