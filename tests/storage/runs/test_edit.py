"""Runs that are removed, renamed and merged: other rows are unchanged; tags and notes of runs."""

import datetime as dt
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from tests.storage.rows import Killed, ask, data_files, dying, files, put, table

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.errors import ConflictError, ShardLockError, StoreError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import conform
from rankscope_storage.connection import connect
from rankscope_storage.files.encoding import write_file
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.maintenance import compaction
from rankscope_storage.maintenance.check import check
from rankscope_storage.maintenance.compaction import compact
from rankscope_storage.maintenance.upgrade import upgrade
from rankscope_storage.runs import edit, tags
from rankscope_storage.runs.tags import TagsAndNote, edit_tags, parse_tags, remove_tags, set_note, set_tags


def run_version(run: str, state: str, *, kind: str = "live") -> Batch:
    row = {"run": run, "state": state, "ordinal": 1, "source_kind": kind}
    return Batch(tables={"runs": table("runs", [row])}, watermarks={})


def told(root) -> dict[str, list[tuple]]:
    found: dict[str, list[tuple]] = {}
    for run, *rest in ask(root, "SELECT run, attempt, incarnation, seq FROM scalars ORDER BY ALL"):
        found.setdefault(run, []).append(tuple(rest))
    return found


def expected(attempt: int, incarnation: str, count: int) -> list[tuple]:
    return [(attempt, incarnation, seq) for seq in range(count)]


@pytest.fixture(params=["own parts", "one shared file"])
def root(request, store, writer, batch: Callable, monkeypatch):
    """Return a store of the ended runs a, b and c, without a running service."""
    if request.param == "own parts":
        monkeypatch.setattr("rankscope_storage.files.sorting.OWN_PART_ROWS", 1)
    for number, run in enumerate("abc"):
        writer.append(batch(range(4 + number), run=run, incarnation=f"i{run}"))
        writer.append(run_version(run, "completed"))
    if request.param == "one shared file":
        monkeypatch.setattr(compaction, "SMALL_FILES", 1)
        compact(store.root, sync_to_disk)
    writer.close()
    return store.root


@pytest.mark.usual(1)
def test_removed_run_has_no_rows_and_others_are_unchanged(root):
    report = edit.remove(root, "b", sync_to_disk)

    assert 6 == report.rows  # five scalars and the row in `runs`
    assert {"a": expected(0, "ia", 4), "c": expected(0, "ic", 6)} == told(root)
    assert check(root, deep=True).is_intact
    assert [("a",), ("c",)] == ask(root, "SELECT run FROM runs ORDER BY run")


@pytest.mark.usual(1)
def test_renamed_run_has_all_rows_under_its_new_name(root):
    edit.rename(root, "b", "new/name", sync_to_disk)

    assert {"a": expected(0, "ia", 4), "c": expected(0, "ic", 6), "new/name": expected(0, "ib", 5)} == told(root)
    assert check(root, deep=True).is_intact
    with connect(root) as connection:
        assert not any("part=b/" in file for file in connection.files("scalars"))


@pytest.mark.usual(1)
def test_merged_run_has_attempts_after_those_of_the_other(root):
    edit.merge(root, "b", "a", sync_to_disk)

    assert {"a": expected(0, "ia", 4) + expected(1, "ib", 5), "c": expected(0, "ic", 6)} == told(root)
    assert check(root, deep=True).is_intact
    assert [(5,)] == ask(root, "SELECT count(*) FROM loss_curve WHERE run = 'a'")
    assert [(1,), (3,)] == ask(root, "SELECT ordinal FROM runs_history WHERE run = 'a' ORDER BY 1")


@pytest.mark.usual(1)
def test_existing_unprintable_or_empty_name_or_missing_run_is_refused(root):
    """Rows without a run are samples of exporters."""
    before, said = told(root), "name of a run must (not be empty|consist of at most 1000 printable characters)"
    for name in ("", "  ", "x" * 1001, "a\nb"):
        with pytest.raises(StoreError, match=said):
            edit.rename(root, "a", name, sync_to_disk)
    with pytest.raises(StoreError, match="a run named 'a' already exists"):
        edit.rename(root, "b", "a", sync_to_disk)
    with pytest.raises(StoreError, match="there is no run named 'nobody'"):
        edit.merge(root, "b", "nobody", sync_to_disk)
    with pytest.raises(StoreError, match="cannot be joined to itself"):
        edit.merge(root, "b", "b", sync_to_disk)

    assert before == told(root)


def test_running_run_cannot_be_edited_while_its_service_runs(store, writer, batch):
    writer.append(batch(range(3)))
    writer.append(run_version("r", "running"))
    with pytest.raises(ShardLockError, match=r"'r' is running: .* host-a pid 1, which is running"):
        edit.remove(store.root, "r", sync_to_disk)
    writer.close()

    assert 4 == edit.remove(store.root, "r", sync_to_disk).rows


def test_service_appends_other_runs_during_an_edit(store, writer, batch):
    writer.append(batch(range(3), run="old", incarnation="i-old"))
    writer.append(run_version("old", "failed"))
    writer.append(batch(range(3)))
    edit.remove(store.root, "old", sync_to_disk)
    writer.append(batch(range(3, 5)))

    assert {"r": expected(0, "i0", 5)} == told(store.root)


def test_no_service_can_claim_during_the_rename_of_a_dead_run(store, writer, batch, monkeypatch):
    """Its rows would keep the old name. After the rename, a service can claim the shard."""
    writer.append(batch(range(3)))
    writer.append(run_version("r", "running"))
    writer.close()
    tried = []
    genuine = edit.write_file

    def meanwhile(*arguments, **options):
        with pytest.raises(ShardLockError, match="rankscope runs, which is running"):
            store.claim(owner="b")
        tried.append(1)
        return genuine(*arguments, **options)

    monkeypatch.setattr(edit, "write_file", meanwhile)
    edit.rename(store.root, "r", "new", sync_to_disk)

    assert tried
    assert ["new"] == list(told(store.root))
    store.claim(owner="b").close()


def on_replacing_commit(monkeypatch, actions, last=None) -> None:
    """Call one of `actions` before each of the next commits that replace files, and then always `last`."""
    genuine, remaining = Log.commit, iter(actions)

    def commit(log, change):
        if change.removed and (action := next(remaining, last)) is not None:
            action()
        return genuine(log, change)

    monkeypatch.setattr(Log, "commit", commit)


def refuse():
    raise ConflictError("a compaction was first")


@pytest.fixture
def two(writer, batch):
    """Store three scalars of each of the ended runs r and other."""
    for run in ("r", "other"):
        writer.append(batch(range(3), run=run, incarnation=f"i{run}"))
        writer.append(run_version(run, "completed"))


BEFORE = {"other": expected(0, "iother", 3)}


@pytest.mark.usual(1)
@pytest.mark.parametrize(
    ("act", "names", "after"),
    [
        ("rename", ("r", "new"), {"new": expected(0, "ir", 5), **BEFORE}),
        ("merge", ("r", "other"), {"other": BEFORE["other"] + expected(1, "ir", 5)}),
        ("remove", ("r",), BEFORE),
    ],
)
def test_rows_appended_during_an_edit_are_edited_too(store, writer, batch, two, monkeypatch, act, names, after):
    """The run has ended according to the store, but a ring still had records of it."""
    on_replacing_commit(monkeypatch, [lambda: writer.append(batch(range(3, 5), incarnation="ir"))])
    done = getattr(edit, act)(store.root, *names, sync_to_disk)

    assert after == told(store.root)
    assert 6 == done.rows  # five scalars and the row in `runs`


@pytest.mark.thorough
def test_refusals_are_counted_from_the_last_success_and_reported(store, writer, batch, monkeypatch):
    """A compaction commits first again and again, and the service appends each time."""
    writer.append(batch(range(1), incarnation="ir"))
    writer.append(run_version("r", "completed"))
    seqs = iter(range(1, 100))
    tries = [refuse, refuse, refuse, lambda: writer.append(batch([next(seqs)], incarnation="ir"))] * 3
    on_replacing_commit(monkeypatch, tries, last=refuse)
    message = r"4 rows of run 'r' were changed, but a service continues .*`rankscope runs merge`"
    with pytest.raises(StoreError, match=message):
        edit.rename(store.root, "r", "new", sync_to_disk)

    assert {"new": expected(0, "ir", 3), "r": [(0, "ir", 3)]} == told(store.root)


def test_merge_counts_attempts_appended_to_the_target_meanwhile(store, writer, two, monkeypatch):
    """A compaction also commits first, so that the first try is refused."""

    def append_and_refuse():
        again = {"run": "other", "incarnation": "iother", "seq": 3, "attempt": 1, "name": "loss"}
        put(writer, "scalars", [again], {"iother": 3})
        refuse()

    on_replacing_commit(monkeypatch, [append_and_refuse])
    edit.merge(store.root, "r", "other", sync_to_disk)

    assert [*expected(0, "iother", 3), (1, "iother", 3), *expected(2, "ir", 3)] == told(store.root)["other"]


@pytest.mark.parametrize(("kind", "again"), [("jsonl", 3), ("live", 0)])
def test_removed_import_can_be_repeated_but_ranks_do_not_send_again(store, batch, kind, again):
    with Store.open(store.root).claim(owner="importer") as writer:
        writer.append(batch(range(3)))
        writer.append(run_version("r", "completed", kind=kind))
        edit.remove(store.root, "r", sync_to_disk)
        writer.append(batch(range(3)))

    assert again == len(told(store.root).get("r", []))


@pytest.mark.usual(1)
def test_removal_killed_before_its_commit_changes_nothing(root):
    before = told(root)
    with pytest.raises(Killed):
        edit.rename(root, "b", "z", dying(1))

    assert before == told(root)
    edit.rename(root, "b", "z", sync_to_disk)
    assert before["b"] == told(root)["z"]


def test_removed_source_leaves_the_rows_of_ranks_and_of_other_formats(store, writer, batch):
    for incarnation in ("log", "rank"):
        writer.append(batch(range(3), run="r", incarnation=incarnation))
    rows = [{"attempt": attempt, "source_kind": kind} for attempt in (0, 1) for kind in ("jsonl", "live")]
    for dataset in ("runs", "attempts"):
        put(writer, dataset, rows, run="r", state="completed", ordinal=1)
    writer.close()
    edit.remove_source(store.root, "r", sync_to_disk, frozenset({"log"}), kind="jsonl", attempts=frozenset({1}))
    asked = "SELECT attempt, source_kind FROM {}_history ORDER BY ALL"
    kept = [ask(store.root, asked.format(name)) for name in ("runs", "attempts")]

    assert {"r": expected(0, "rank", 3)} == told(store.root)
    assert [[(0, "jsonl"), (0, "live"), (1, "live")]] * 2 == kept


# Tags and notes: stored with any order of writers, removable, and independent of the service.

OLD_STORE = Path(__file__).parents[1] / "data" / "store_without_labels"
MOMENT = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def version(state: str, ordinal: int, run: str = "r") -> Batch:
    """Return the row of a service for a run; `ordinal` is its clock."""
    row = {"run": run, "attempt": 0, "state": state, "ordinal": ordinal, "source_kind": "live"}
    row["ts"] = MOMENT + dt.timedelta(microseconds=ordinal)
    return Batch(tables={"runs": table("runs", [row])}, watermarks={})


def shown(tagged, columns="state, tags, note", run="r"):
    return ask(tagged, f"SELECT {columns} FROM runs WHERE run = '{run}'")


@pytest.fixture
def tagged(store, writer):
    writer.append(version("running", 1))
    return store.root


def test_secrets_in_tags_and_notes_are_masked(tagged):
    edit_tags(
        tagged, "r", set_tags({"hf_token": "correct-horse", "url": "https://bob:correct-horse@host"}), sync_to_disk
    )
    edit_tags(tagged, "r", set_note("the password is correct-horse"), sync_to_disk)

    expected = '{"hf_token":"***","url":"https://***@host"}'
    assert [("running", expected, "the password is ***")] == shown(tagged)


def test_service_writes_its_run_without_removing_tags(tagged, writer, batch):
    edit_tags(tagged, "r", set_tags({"keep": "yes"}), sync_to_disk)
    writer.append(batch(range(3)))
    writer.append(version("completed", 2))
    edit_tags(tagged, "r", set_note("done"), sync_to_disk)

    assert [("completed", '{"keep":"yes"}', "done")] == shown(tagged)


def test_concurrent_tag_does_not_restore_an_older_state(tagged, writer):
    """The service stores the end of the run between the read and the commit of the edit."""

    def late(known: TagsAndNote) -> TagsAndNote:
        writer.append(version("failed", 2))
        return set_tags({"a": "1"})(known)

    edit_tags(tagged, "r", late, sync_to_disk)

    assert [("failed", '{"a":"1"}', None)] == shown(tagged)


def test_concurrent_edits_of_tags_are_both_stored(tagged):
    """Both read the same version: the second commit is refused, and repeated on top of the first."""
    others = iter([set_tags({"other": "2"})])

    def mine(known: TagsAndNote) -> TagsAndNote:
        for other in others:
            edit_tags(tagged, "r", other, sync_to_disk)
        return set_tags({"mine": "1"})(known)

    edit_tags(tagged, "r", mine, sync_to_disk)

    assert files(tagged).num_rows == len(data_files(tagged))  # none of the refused commit
    assert [("running", '{"mine":"1","other":"2"}', None)] == shown(tagged)


def test_tags_survive_compaction_and_follow_a_renamed_run(tagged, writer, monkeypatch):
    monkeypatch.setattr("rankscope_storage.maintenance.compaction.SMALL_FILES", 1)
    edit_tags(tagged, "r", set_tags({"a": "1"}), sync_to_disk)
    writer.append(version("completed", 2))
    compact(tagged, sync_to_disk)

    assert [("completed", '{"a":"1"}', None)] == shown(tagged)
    writer.close()
    edit.rename(tagged, "r", "better", sync_to_disk)

    assert [] == shown(tagged)
    assert [("completed", '{"a":"1"}', None)] == shown(tagged, run="better")


def test_clock_set_back_does_not_restore_older_tags(tagged):
    later = tags._new_version(tags._known(tagged, "r"), TagsAndNote({"a": "old"}))
    ahead = pa.array([MOMENT.replace(year=2090)], later.schema.field("ts").type)
    later = later.set_column(later.schema.get_field_index("ts"), "ts", ahead)
    file = write_file(tagged, "runs", "_shared-2090-01-01", conform(later, "runs"), sync_to_disk)
    tags.Log.open(tagged, sync_to_disk).commit(Change(added=[file]))
    edit_tags(tagged, "r", set_tags({"a": "new"}), sync_to_disk)

    assert [("running", '{"a":"new"}', None)] == shown(tagged)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        *((set_tags({"": "x"}), "not a valid tag key"), (set_tags({"a=b": "x"}), "not a valid tag key")),
        *((set_tags({"k" * 101: "x"}), "1 to 100 printable"), (set_tags({"k": "v" * 1001}), "at most 1000")),
        *((set_tags({"k": "a\nb"}), "printable"), (set_tags({"k": "\udcff"}), "printable")),
        (set_tags({f"k{n}": "" for n in range(101)}), "at most 100 tags"),
        *((remove_tags(["nothing"]), "no tag nothing: it has no tags"), (set_note("x" * 10_001), "at most 10000")),
        (set_note("a\x1b[2J"), "printable"),
    ],
)
def test_invalid_tags_and_notes_are_refused(change, complaint):
    with pytest.raises(StoreError, match=complaint):
        change(TagsAndNote())


def test_refused_edit_of_tags_changes_nothing(tagged, writer, batch):
    writer.append(batch(range(3), run="rows alone", incarnation="i1"))
    with pytest.raises(StoreError, match="not a valid tag key"):
        edit_tags(tagged, "r", set_tags({"good": "1", "": "x"}), sync_to_disk)
    with pytest.raises(StoreError, match="run 'rows alone' is not registered"):
        edit_tags(tagged, "rows alone", set_note("x"), sync_to_disk)

    assert [("running", None, None)] == shown(tagged)


def test_invalid_tags_of_another_program_are_ignored():
    assert [{}] * 6 == [*map(parse_tags, [None, "", "no JSON", "[1]", "3", '{"a": 1}'])]


def test_full_disk_raises_store_error_for_tags(tagged, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tags, "write_file", full)
    with pytest.raises(StoreError, match=r"cannot write to .*No space left on device"):
        edit_tags(tagged, "r", set_note("x"), sync_to_disk)


# A store with files that lack these columns.


@pytest.fixture
def old(tmp_path):
    root = Path(shutil.copytree(OLD_STORE, tmp_path / "old"))
    upgrade(root, sync_to_disk)
    return root


def test_store_of_a_release_without_tags_accepts_tags_and_rows(old):
    """An earlier release wrote the files in `tests/storage/data`, which must not change."""
    assert [("completed", None, None)] == shown(old, run="before")

    edit_tags(old, "before", set_tags({"kept": "1"}), sync_to_disk)
    with Store.open(old).claim(owner="after") as writer:
        writer.append(version("running", 20, run="after"))

    assert [("completed", '{"kept":"1"}', None)] == shown(old, run="before")
    assert [("running", None)] == shown(old, "state, tags", "after")
    assert [(1.0,), (1 / 2,), (1 / 3,)] == ask(old, "SELECT value FROM scalars ORDER BY step")
    [(config,)] = shown(old, "config", run="before")
    assert ["train.py"] == json.loads(config)["argv"]
    assert check(old, deep=True).is_intact
