"""Exactly-once appends: repeats, overlaps, refusals, and commits without a result."""

import threading
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.properties import examples
from tests.storage.rows import ask, data_files

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.errors import BatchError, ConflictError, StoreError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.connection import connect
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.log.entries import entry, newest_checkpoint

COUNT = "SELECT count(*) FROM scalars"


def stored_seqs(connection) -> list[int]:
    return [seq for (seq,) in ask(connection, "SELECT seq FROM scalars ORDER BY 1")]


def test_append_is_visible_at_the_returned_version_and_moves_the_watermark(writer, batch, connection):
    before = writer.watermark("i0")
    commit = writer.append(batch(range(5)))

    assert [0, 1, 2, 3, 4] == stored_seqs(connection)
    assert {"scalars": 5} == commit.rows
    assert (1, connection.version) == (commit.files, commit.version)
    assert (-1, 4) == (before, writer.watermark("i0"))


def test_watermark_advances_over_records_without_rows(writer, store):
    """A record can be empty. Its seq is stored too, otherwise the rank would send it again forever."""
    commit = writer.append(Batch(tables={}, watermarks={"i0": 7}))

    assert ({}, 0, 7) == (commit.rows, commit.files, writer.watermark("i0"))


def test_repeated_batch_stores_nothing_and_an_overlapping_one_only_new_rows(writer, batch, connection):
    first = writer.append(batch(range(5)))
    again = writer.append(batch(range(5)))
    overlapping = writer.append(batch(range(3, 9)))

    assert ({}, 0, first.version) == (again.rows, again.files, again.version)
    assert {"scalars": 4} == overlapping.rows
    assert list(range(9)) == stored_seqs(connection)


def test_watermark_never_decreases(writer, batch):
    writer.append(batch(range(5)))
    writer.append(batch(range(2)))

    assert 4 == writer.watermark("i0")


def test_rows_without_incarnation_or_seq_are_always_stored(writer, scalars, connection):
    """Rows of the service have no incarnation; its notes about a rank have an incarnation but no seq."""
    writer.append(Batch(tables={"scalars": scalars(range(3))}, watermarks={"i0": 2}))
    nobody = scalars(range(2), incarnation=None)
    no_seq = scalars(range(2)).set_column(4, "seq", pa.nulls(2, pa.int64()))
    commit = writer.append(Batch(tables={"scalars": pa.concat_tables([nobody, no_seq])}, watermarks={}))

    assert {"scalars": 4} == commit.rows


@pytest.mark.parametrize("is_coded", [False, True])
def test_each_incarnation_is_filtered_by_its_watermark(writer, scalars, connection, is_coded):
    """Text can be dictionary-encoded and chunked. If a rank sent rows above it again, they would be stored twice."""
    writer.append(Batch(tables={"scalars": scalars(range(2))}, watermarks={"i0": 1}))
    table = pa.concat_tables([scalars(range(3)), scalars(range(6), run="s", incarnation="i1")])
    for name in ("run", "incarnation", "name") if is_coded else ():
        column = pa.chunked_array([chunk.dictionary_encode() for chunk in table.column(name).chunks])
        table = table.set_column(table.column_names.index(name), name, column)
    commits = [writer.append(Batch(tables={"scalars": table}, watermarks={"i0": 2, "i1": 5})) for _ in range(2)]

    assert [{"scalars": 7}, {}] == [commit.rows for commit in commits]
    assert [("r", 3), ("s", 6)] == ask(connection, "SELECT run, count(*) FROM scalars GROUP BY 1 ORDER BY 1")
    for watermarks in ({"i0": 3}, {"i0": 3, "i1": 4}):
        with pytest.raises(BatchError, match="seq above the batch's watermark"):
            writer.append(Batch(tables={"scalars": table}, watermarks=watermarks))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: table.append_column("extra", pa.nulls(len(table))), "has no column extra"),
        (lambda table: table.drop_columns("run"), "scalars.run is null in 3 rows"),
        (lambda table: table.set_column(8, "value", [["a", "b", "c"]]), "scalars.value must be double"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_any_write(writer, scalars, store, change, words):
    with pytest.raises(BatchError, match=words):
        writer.append(Batch(tables={"scalars": change(scalars(range(3)))}, watermarks={"i0": 2}))

    assert -1 == writer.watermark("i0")
    assert [] == list(store.root.glob("dataset=*"))


def test_unknown_dataset_is_refused_with_the_list_of_datasets(writer, scalars):
    with pytest.raises(BatchError, match="tensor_stats"):
        writer.append(Batch(tables={"scalar": scalars([0])}, watermarks={"i0": 0}))


def test_watermark_committed_by_another_shard_is_noticed(store, batch, connection):
    """Watermarks are cached; the cache must include commits of other writers."""
    with store.claim("0/2", owner="a") as one, store.claim("1/2", owner="b") as other:
        one.append(batch(range(3)))
        other.append(batch(range(6)))
        one.append(batch(range(8)))

        assert 7 == one.watermark("i0")

    assert list(range(8)) == stored_seqs(connection)


def test_cached_watermarks_are_dropped_if_log_entries_are_missing(store, batch, monkeypatch, connection):
    with store.claim("0/2", owner="a") as one, store.claim("1/2", owner="b") as other:
        one.append(batch(range(3)))
        other.append(batch(range(6)))
        monkeypatch.setattr(Log, "changed_transactions", lambda log, since: None)
        one.append(batch(range(8)))

    assert list(range(8)) == stored_seqs(connection)


def test_changed_transactions_is_none_after_clean_up_of_an_entry(store, writer, batch):
    for seq in range(3):
        writer.append(batch([seq]))
    log = Log.open(store.root, sync_to_disk)

    assert {"w:i0": 2, "ingest:0/1": 4} == log.changed_transactions(2)

    (store.root / "_delta_log" / "00000000000000000003.json").unlink()

    assert log.changed_transactions(2) is None


def test_all_transactions_are_those_of_checkpoint_and_entries(store, batch):
    counts = []
    for owner in "abc":
        with store.claim(owner=owner) as writer:
            for number in range(7):
                writer.append(batch([number], incarnation=f"i{number}-{len(counts)}"))
        log = Log.open(store.root, sync_to_disk)
        found = log.transactions()
        assert {name: log.transaction(name) for name in found} == found
        counts.append((len(found), log.transaction("ingest:0/1"), newest_checkpoint(store.root) >= 0))

    assert [(8, 8, False), (15, 16, True), (22, 24, True)] == counts
    (store.root / "_delta_log" / "_last_checkpoint").unlink()  # Delta does not require it
    entry(store.root, 0).unlink()
    assert found == Log.open(store.root, sync_to_disk).transactions()
    for checkpoint in (store.root / "_delta_log").glob("*.checkpoint.parquet"):
        checkpoint.unlink()  # as by vacuum, while the handle is open

    assert log.transactions() is None


GENUINE = Log.commit


def on_commit(monkeypatch, *actions) -> None:
    """Call one of `actions` before each of the next commits, without a pause between tries."""
    remaining = iter(actions)

    def commit(log: Log, change: Change) -> int:
        if (action := next(remaining, None)) is not None:
            action(log, change)
        return GENUINE(log, change)

    monkeypatch.setattr(Log, "commit", commit)
    monkeypatch.setattr("rankscope_storage.writer.writer._FIRST_PAUSE_SECONDS", 0.0)


def refuse(log: Log, change: Change) -> None:
    raise ConflictError("metadata changed")


def fail(log: Log, change: Change) -> None:
    raise StoreError("the disk hiccuped")


def commit_and_fail(log: Log, change: Change) -> None:
    GENUINE(log, change)
    fail(log, change)


def test_refused_append_is_retried_and_leaves_no_file(writer, batch, monkeypatch, store, connection):
    on_commit(monkeypatch, *[refuse] * 2)
    writer.append(batch(range(5)))

    assert list(range(5)) == stored_seqs(connection)
    assert 1 == len(data_files(store.root))


def test_files_vacuumed_before_their_commit_are_written_again(writer, batch, monkeypatch, connection, store):
    """A service was suspended for hours between the two; vacuum deleted its files as uncommitted ones."""
    on_commit(monkeypatch, lambda log, change: (store.root / change.added[0].path).unlink())
    writer.append(batch(range(5)))

    assert list(range(5)) == stored_seqs(connection)


def test_append_fails_after_six_refusals(writer, batch, monkeypatch, store):
    on_commit(monkeypatch, *[refuse] * 6)
    with pytest.raises(StoreError, match="refused 6 times"):
        writer.append(batch(range(5)))

    assert [] == data_files(store.root)


def test_unknown_commit_is_resolved_after_an_append_of_another_batch(writer, scalars, monkeypatch, connection):
    """The service appends pushed batches concurrently with polled ones."""
    pushed = Batch(tables={"scalars": scalars(range(2), incarnation=None)}, watermarks={})
    on_commit(monkeypatch, commit_and_fail)
    with pytest.raises(StoreError, match="hiccuped"):
        writer.append(pushed)
    writer.append(Batch(tables={"scalars": scalars(range(5))}, watermarks={"i0": 4}))
    writer.append(pushed)

    assert [(7,)] == ask(connection, COUNT)


def test_next_owner_finds_watermarks_and_the_info_of_batches(store, scalars):
    """The end of a `with` statement releases the shard."""
    with store.claim(owner="first") as writer:
        writer.append(Batch(tables={"scalars": scalars(range(2))}, watermarks={"i0": 1}, info={"receipts": "a b"}))
        writer.append(Batch(tables={"scalars": scalars(range(4))}, watermarks={"i0": 3}))

    with store.claim(owner="next") as successor:
        assert (["a b"], 3) == (successor.commit_info("receipts", 10), successor.watermark("i0"))


@pytest.mark.parametrize("failure", [commit_and_fail, fail])
def test_unknown_commit_is_resolved_when_its_batch_is_retried(writer, scalars, monkeypatch, connection, failure):
    """This includes rows without a watermark, which would otherwise be stored twice."""
    tables = {"scalars": pa.concat_tables([scalars(range(3)), scalars(range(2), incarnation=None)])}
    batch = Batch(tables=tables, watermarks={"i0": 2})
    on_commit(monkeypatch, failure)
    with pytest.raises(StoreError, match="hiccuped"):
        writer.append(batch)
    commit = writer.append(batch)
    writer.append(Batch(tables={"scalars": scalars(range(5))}, watermarks={"i0": 4}))

    assert {"scalars": 5} == commit.rows
    assert [(7,)] == ask(connection, COUNT)


def test_resolved_commit_is_fsynced_before_it_is_acknowledged(writer, batch, monkeypatch):
    """The failed commit wrote its entry but did not fsync it."""
    synced, rows = [], batch(range(3))
    with monkeypatch.context() as unsynced:
        unsynced.setattr(Log, "make_durable", lambda log: fail(log, Change()))
        with pytest.raises(StoreError, match="hiccuped"):
            writer.append(rows)
    monkeypatch.setattr(writer._log, "_sync", synced.append)
    commit = writer.append(rows)

    assert f"{commit.version:020d}.json" in [path.name for path in synced]


def test_full_disk_raises_store_error_and_the_batch_can_be_retried(writer, batch, monkeypatch, connection, store):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rankscope_storage.files.encoding.pq.ParquetWriter.write_table", full)
    with pytest.raises(StoreError, match="No space left on device"):
        writer.append(batch(range(5)))
    monkeypatch.undo()

    assert [] == list((store.root / "_staging").iterdir())

    (store.root / "_staging").rmdir()  # it is created again
    writer.append(batch(range(5)))

    assert list(range(5)) == stored_seqs(connection)


def test_appends_of_two_threads_are_serialised(writer, batch, connection):
    def append(incarnation: str) -> None:
        for seq in range(10):
            writer.append(batch([seq], incarnation=incarnation))

    threads = [threading.Thread(target=append, args=(f"t{number}",)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [(20,)] == ask(connection, COUNT)


def test_append_fsyncs_files_folders_entry_and_log_in_this_order(folder, batch):
    """The file, its folders, the entry that names it, the folder of the log."""
    seen: list[tuple[str, bool]] = []
    entry = folder / "_delta_log" / "00000000000000000002.json"

    def record(path: Path) -> None:
        name = path.relative_to(folder).as_posix()
        seen.append(("staged file" if name.startswith("_staging/") else name, entry.exists()))

    writer = Store.open(folder, create=True, sync=record).claim(owner="a")
    seen.clear()
    with writer:
        writer.append(batch(range(3)))
    (part,) = (path.name for path in folder.glob("dataset=scalars/part=*"))

    folders = [(".", False), ("dataset=scalars", False), (f"dataset=scalars/{part}", False)]
    log = [("_delta_log/00000000000000000002.json", True), ("_delta_log", True)]
    assert [("staged file", False), *folders, *log] == seen


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(deliveries=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.booleans()), max_size=8))
def test_every_record_is_stored_once_for_any_repeated_deliveries(tmp_path_factory, batch, deliveries):
    """A rank sends from the watermark or below; the service can be killed between any two deliveries."""
    store = Store.open(tmp_path_factory.mktemp("store"), create=True)
    writer, expected = store.claim(owner="a"), -1
    for start, count, restarted in deliveries:
        if restarted:
            writer.close()
            writer = store.claim(owner="a")
        first = min(start, writer.watermark("i0") + 1)
        writer.append(batch(range(first, first + count)))
        expected = max(expected, first + count - 1)
    writer.close()
    with connect(store.root) as connection:
        assert list(range(expected + 1)) == stored_seqs(connection)
