"""Damaged stores: the findings of `check`, the results of `repair`, and its refusals."""

import errno
import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.storage.rows import ask, data_files, entries, put, table

from rankscope_contract.model.kinds import DEFAULT_OPS
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.datasets import DATASETS, DIMENSIONS, ROLLUPS
from rankscope_storage.base.errors import ShardLockError, StoreError, TornLogError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.connection import connect
from rankscope_storage.files.encoding import DataFile
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.log.entries import LOG_FOLDER
from rankscope_storage.maintenance import check as checking
from rankscope_storage.maintenance import compaction
from rankscope_storage.maintenance.check import FindingKind, check
from rankscope_storage.maintenance.repair import DAMAGED, repair
from rankscope_storage.maintenance.stats import store_stats
from rankscope_storage.writer.writer import write_checkpoint

TENSOR = {"run": "r", "incarnation": "i", "kind": "k", "tensor": "t"}


@pytest.fixture
def left(store, writer, batch) -> Path:
    """Return a store with three commits of five rows each, of two runs, without a running service."""
    for number in range(3):
        writer.append(
            batch(range(5 * number, 5 * number + 5), run="r" if number else "first", incarnation=f"i{number}")
        )
    writer.close()
    return store.root


def kinds(root, **options) -> list[FindingKind]:
    return [finding.kind for finding in check(root, **options).findings]


def rows(root) -> int:
    return ask(root, "SELECT count(*) FROM scalars")[0][0]


def tear(root) -> Path:
    newest = entries(root)[-1]
    torn = newest.with_name(f"{int(newest.stem) + 1:020d}.json")
    torn.write_bytes(newest.read_bytes()[:40])
    return torn


def test_check_of_an_intact_store_has_no_findings(left):
    report = check(left, deep=True)

    assert (3, 15, (), True) == (report.files, report.rows, report.findings, report.is_intact)
    assert not repair(left, sync_to_disk, deep=True).changed


def test_missing_file_is_reported_with_its_rows_and_removed_from_the_log(left, batch):
    data_files(left)[0].unlink()
    (finding,) = check(left).findings

    assert FindingKind.MISSING == finding.kind
    assert "5 rows of scalars, run first, steps 0 to 4" in finding.text
    (lost,) = repair(left, sync_to_disk).lost
    assert "5 rows of scalars, run first, steps 0 to 4" in lost
    assert check(left).is_intact
    with Store.open(left).claim(owner="next") as writer:
        writer.append(batch(range(5, 8), incarnation="new"))
    assert 10 + 3 == rows(left)


@pytest.mark.parametrize("kept", [0, 300])
def test_truncated_file_is_moved_to_damaged(left, kept):
    path = data_files(left)[1]
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])

    assert [FindingKind.OTHER_SIZE] == kinds(left)
    repair(left, sync_to_disk)
    assert (whole[:kept], 10) == ((left / DAMAGED / path.name).read_bytes(), rows(left))


def test_deep_check_finds_damaged_bytes_by_decoding(left):
    path = data_files(left)[1]
    content = bytearray(path.read_bytes())
    content[10:200] = bytes(byte ^ 0xFF for byte in content[10:200])
    path.write_bytes(content)

    assert ([], [FindingKind.UNREADABLE]) == (kinds(left), kinds(left, deep=True))
    repair(left, sync_to_disk, deep=True)
    assert check(left, deep=True).is_intact
    assert 10 == rows(left)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda told: told.update(numRecords=6), "has 5 rows, 6 in the log"),
        (lambda told: told["maxValues"].update(step=12), "has step 10 to 14, 10 to 12 in the log"),
        (lambda told: told["minValues"].update(run="q"), "has run r to r, q to r in the log"),
    ],
)
def test_file_that_differs_from_the_log_is_damage_and_not_repaired(left, change, said):
    lines = [json.loads(line) for line in entries(left)[-1].read_text().splitlines()]
    (added,) = (line["add"] for line in lines if "add" in line)
    told = json.loads(added["stats"])
    change(told)
    added["stats"] = json.dumps(told)
    entries(left)[-1].write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (finding,) = check(left).findings

    assert FindingKind.OTHER_CONTENT == finding.kind
    assert said in finding.text
    assert not check(left).is_intact
    assert not repair(left, sync_to_disk).changed


def test_torn_newest_entry_is_moved_away_without_losing_stored_rows(left):
    torn = tear(left)

    assert (None, [FindingKind.TORN_LOG]) == (check(left).version, kinds(left))
    assert torn.name == repair(left, sync_to_disk, dry_run=True).torn_entry
    assert torn.exists()
    assert torn.name == repair(left, sync_to_disk).torn_entry
    assert check(left).is_intact
    assert 15 == rows(left)


def test_moved_torn_entry_is_reported_also_if_files_are_unavailable(left):
    torn = tear(left)
    (left / "dataset=scalars").rename(left / "elsewhere")
    with pytest.raises(StoreError, match=rf"^{torn.name} moved to _damaged/\. no file of scalars is left"):
        repair(left, sync_to_disk)

    assert (left / DAMAGED / torn.name).exists()


def test_torn_entry_before_later_entries_is_not_repaired(left):
    entries(left)[-2].write_bytes(entries(left)[-2].read_bytes()[:30])

    assert [FindingKind.TORN_LOG] == kinds(left)
    with pytest.raises(StoreError, match="later entries exist"):
        repair(left, sync_to_disk)


def test_orphan_files_are_reported_and_are_no_damage(left):
    (data_files(left)[0].parent / "orphan.parquet").write_bytes(b"x" * 7)
    (left / "_staging" / "half.parquet").write_bytes(b"x")

    assert [FindingKind.UNUSED, FindingKind.STAGED] == kinds(left)
    assert check(left).is_intact
    assert not repair(left, sync_to_disk).changed


def test_repair_deletes_old_orphan_files_but_no_used_files(left):
    orphan, staged = data_files(left)[0].parent / "orphan.parquet", left / "_staging" / "rolling-1"
    orphan.write_bytes(b"x" * 7)
    staged.mkdir()
    (staged / "spilled.tmp").write_bytes(b"x" * 5)
    for path in (*left.rglob("*"), left / "_staging"):
        os.utime(path, (0, 0))
    planned = repair(left, sync_to_disk, dry_run=True)

    assert (2, 12, True) == (planned.swept, planned.swept_bytes, orphan.exists())
    assert planned == repair(left, sync_to_disk)
    assert [False, False] == [orphan.exists(), staged.exists()]
    assert 15 == rows(left)
    assert not repair(left, sync_to_disk).changed


def test_files_just_removed_from_the_log_are_not_deleted_by_that_repair(left):
    missing, *_ = data_files(left)
    orphan = missing.with_name("orphan.parquet")
    orphan.write_bytes(b"x")
    os.utime(orphan, (0, 0))
    missing.unlink()

    assert (1, 0) == (len(repair(left, sync_to_disk).lost), repair(left, sync_to_disk, dry_run=True).swept - 1)
    assert orphan.exists()


def test_temporarily_unavailable_file_is_removed_only_with_force(left):
    """A link to itself simulates an unavailable disk: the error differs from that of a missing file."""
    path = data_files(left)[0]
    path.unlink()
    path.symlink_to(path.name)
    (finding,) = check(left).findings

    assert FindingKind.OUT_OF_REACH == finding.kind
    assert "cannot be read now (Too many levels of symbolic links); 5 rows of scalars" in finding.text
    for dry_run in (True, False):
        with pytest.raises(StoreError, match=r"cannot be read now .* no file was removed.*repair --force"):
            repair(left, sync_to_disk, dry_run=dry_run)
    assert [FindingKind.OUT_OF_REACH] == kinds(left)
    assert 1 == len(repair(left, sync_to_disk, force=True).lost)
    assert 10 == rows(left)


def test_disk_error_during_decoding_is_no_damage_of_the_file(left, monkeypatch):
    def failing(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checking.pq, "ParquetFile", failing)

    assert [FindingKind.OUT_OF_REACH] * 3 == kinds(left)
    with pytest.raises(StoreError, match="no file was removed"):
        repair(left, sync_to_disk)


def test_stats_and_check_tolerate_files_deleted_meanwhile(left, monkeypatch):
    """Compaction and vacuum delete files between the listing of a folder and the read of a file."""
    genuine = Path.glob

    def and_one_gone(path, pattern):
        yield from genuine(path, pattern)
        if pattern.endswith(".parquet") and "dataset" in pattern:
            yield path / "dataset=scalars" / "part=r" / "gone.parquet"

    before = store_stats(Log.open(left, sync_to_disk), by="run").unused_bytes
    monkeypatch.setattr(Path, "glob", and_one_gone)

    assert before == store_stats(Log.open(left, sync_to_disk), by="run").unused_bytes
    assert check(left).is_intact


def test_rollups_that_are_no_sum_of_rows_are_damage(store, writer):
    row = {"run": "r", "name": "loss", "step": 100, "first_step": 100, "last_step": 199, "rows": 3}
    put(writer, "scalar_rollups", [row], value_count=3)
    assert check(store.root, deep=True).is_intact
    put(writer, "scalar_rollups", [row], value_count=9)

    assert [FindingKind.OTHER_CONTENT] == kinds(store.root, deep=True)


def test_missing_records_are_found(store, writer):
    for seq in (0, 1, 5):
        put(writer, "tensor_stats", [TENSOR | {"seq": seq}], {"i": seq})
    (gap,) = check(store.root, deep=True).findings

    assert FindingKind.GAP == gap.kind
    assert "3 of seq 0 to 5 have no row" in gap.text


NUMBERED = ["tensor_stats", *sorted(DATASETS.keys() - {"tensor_stats", *DIMENSIONS, *ROLLUPS.values()})]


@pytest.mark.usual(3)
@pytest.mark.parametrize("dataset", NUMBERED)
def test_record_stored_twice_is_found_in_every_dataset(store, writer, dataset):
    """Its copy arrived later, in a run with another name. Equal rows of one record are no copies."""
    texts = {field.name: field.name for field in DATASETS[dataset] if field.type == "string"}
    common = {"run": "r", "incarnation": "i", "ts_origin": "ingest", "ts": 5, "ordinal": 1}
    other = {name: f"another {name}" for name in texts}
    told = [{**each, **common, "seq": seq} for seq in range(3) for each in (texts, other)]
    if dataset == "scalars":
        told.append(told[0])
    put(writer, dataset, told, {"i": 2})
    (path,) = data_files(store.root)

    assert () == check(store.root, deep=True).findings
    table = pq.ParquetFile(path).read()
    for name, value in (("run", "s"), ("ts", 6), ("ordinal", 9)):
        if name in table.column_names:
            changed = pa.array([value] * table.num_rows).cast(table.schema.field(name).type)
            table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), changed)
    copy = path.with_name(f"copy{path.name[4:]}")
    pq.write_table(table, copy)
    names = dict(part.split("=", 1) for part in copy.relative_to(store.root).parts[:2])
    file = DataFile(
        path=str(copy.relative_to(store.root)), **names, rows=1, size_bytes=copy.stat().st_size, modified_at_ms=0,
        statistics=json.dumps({"numRecords": table.num_rows}),
    )  # fmt: skip
    Log.open(store.root, sync_to_disk).commit(Change(added=[file]))
    report = check(store.root, deep=True)
    (finding,) = report.findings

    assert (FindingKind.DUPLICATES, dataset, False) == (finding.kind, finding.path, report.is_intact)
    assert f"{len(told)} rows more than" in finding.text


def test_record_with_only_two_equal_rows_is_reported_but_no_damage(store, writer):
    row = {"run": "r", "incarnation": "i", "seq": 0, "name": "loss", "value": 1.0}
    put(writer, "scalars", [row, row], {"i": 0})

    assert [FindingKind.ALIKE] == kinds(store.root, deep=True)
    assert check(store.root, deep=True).is_intact


def test_repair_refuses_while_a_service_runs_and_names_it(store, writer, batch):
    writer.append(batch(range(3)))
    data_files(store.root)[0].unlink()
    with pytest.raises(ShardLockError, match=r"^rankscope store repair needs .* pid 1, which is running: stop it$"):
        repair(store.root, sync_to_disk)

    assert not check(store.root).is_intact


def test_stats_equal_those_of_the_files(left):
    found = store_stats(Log.open(left, sync_to_disk), by="run")
    sizes = sum(path.stat().st_size for path in data_files(left))
    groups = {row["run"]: (row["files"], row["rows"]) for row in found.groups.to_pylist()}

    assert (3, 15, sizes, 0) == (found.files, found.rows, found.size_bytes, found.unused_bytes)
    assert [0.0, 14.0] == [moment.timestamp() for moment in (found.oldest, found.newest)]
    assert {"r": (2, 10), "first": (1, 5)} == groups


def test_stats_are_grouped_by_tier_and_count_seven_statistics_per_row(store, writer, batch):
    writer.append(batch(range(3)))
    put(writer, "scalar_rollups", [{"run": "r", "name": "loss", "rows": 100}])
    put(writer, "runs", [{"run": "r", "state": "running"}])
    put(writer, "tensor_stats", [TENSOR | {"seq": n} for n in range(10)], {"i": 9})
    log = Log.open(store.root, sync_to_disk)
    tiers = {row["tier"]: row["rows"] for row in store_stats(log, by="tier").groups.to_pylist()}
    (figures,) = (row for row in store_stats(log, by="dataset").groups.to_pylist() if row["dataset"] == "tensor_stats")

    assert {"raw": 3 + 10, "rollups": 1, "kept for ever": 1} == tiers
    assert 7 == len({*DEFAULT_OPS} - {"numel"})
    assert figures["bytes"] / 70 == figures["bytes_per_sample"]


def test_file_of_a_newer_schema_is_reported(left, monkeypatch):
    monkeypatch.setattr(checking, "SCHEMA_VERSION", 0)
    texts = [finding.text for finding in check(left).findings]

    assert 3 == sum("and this Rankscope supports up to 0" in text for text in texts)


# The log after a power failure: no acknowledged row is lost.


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
        with pytest.raises(TornLogError, match="move that file away, as `rankscope store repair` does"):
            connect(store.root)
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
        assert 15 == rows(copy)


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

    assert 18 == rows(left)


def test_hint_to_a_missing_checkpoint_is_moved_away(left):
    write_checkpoint(left, sync_to_disk)
    for checkpoint in (left / LOG_FOLDER).glob("*.checkpoint.parquet"):
        checkpoint.unlink()
    assert not check(left).is_intact
    assert "_last_checkpoint" == repair(left, sync_to_disk).torn_checkpoint
    assert check(left).is_intact
    assert 15 == rows(left)
