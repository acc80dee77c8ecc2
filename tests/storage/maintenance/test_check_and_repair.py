"""Damaged stores: the findings of `check`, the results of `repair`, and its refusals."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.properties import THOROUGH

from rankscope_contract.model.kinds import DEFAULT_OPS
from rankscope_contract.model.schema import DATASETS, DIMENSIONS, ROLLUPS
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.errors import ShardLockError, StoreError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.files.encoding import DataFile
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.log.entries import LOG_FOLDER
from rankscope_storage.maintenance import check as checking
from rankscope_storage.maintenance import compaction
from rankscope_storage.maintenance.check import FindingKind, check
from rankscope_storage.maintenance.compaction import compact
from rankscope_storage.maintenance.repair import DAMAGED, repair
from rankscope_storage.maintenance.stats import store_stats


def data_files(root):
    return sorted(root.glob("dataset=*/part=*/*.parquet"), key=lambda path: path.stat().st_mtime_ns)


def newest_entry(root):
    return max((root / LOG_FOLDER).glob("*.json"))


def kinds(root, **options) -> list[FindingKind]:
    return [finding.kind for finding in check(root, **options).findings]


def rows(root) -> int:
    with connect(root) as connection:
        return connection.sql("SELECT count(*) FROM scalars").fetchall()[0][0]


def test_check_of_an_intact_store_has_no_findings(left):
    report = check(left, deep=True)

    assert (3, 15, ()) == (report.files, report.rows, report.findings)
    assert report.is_intact
    assert not repair(left, sync_to_disk, deep=True).changed


def test_missing_file_is_reported_with_its_rows_and_removed_from_the_log(left):
    data_files(left)[0].unlink()
    (finding,) = check(left).findings

    assert FindingKind.MISSING == finding.kind
    assert "5 rows of scalars, run first, steps 0 to 4" in finding.text
    (lost,) = repair(left, sync_to_disk).lost
    assert "5 rows of scalars, run first, steps 0 to 4" in lost
    assert check(left).is_intact
    assert 10 == rows(left)


@pytest.mark.parametrize("kept", [0, 4, 300])
def test_truncated_file_is_moved_to_damaged(left, kept):
    path = data_files(left)[1]
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])

    assert [FindingKind.OTHER_SIZE] == kinds(left)
    repair(left, sync_to_disk)
    assert whole[:kept] == (left / DAMAGED / path.name).read_bytes()
    assert 10 == rows(left)


def test_deep_check_finds_damaged_bytes_by_decoding(left):
    path = data_files(left)[1]
    content = bytearray(path.read_bytes())
    content[10:200] = bytes(byte ^ 0xFF for byte in content[10:200])
    path.write_bytes(content)

    assert [] == kinds(left)
    assert [FindingKind.UNREADABLE] == kinds(left, deep=True)
    repair(left, sync_to_disk, deep=True)
    assert check(left, deep=True).is_intact
    assert 10 == rows(left)


def rewrite_log(root, change) -> None:
    """Modify the statistics of the file in the newest entry by `change`."""
    entry = newest_entry(root)
    lines = [json.loads(line) for line in entry.read_text().splitlines()]
    for line in lines:
        if "add" in line:
            told = json.loads(line["add"]["stats"])
            change(told)
            line["add"]["stats"] = json.dumps(told)
    entry.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda told: told.update(numRecords=6), "has 5 rows, 6 in the log"),
        (lambda told: told["maxValues"].update(step=12), "has step 10 to 14, 10 to 12 in the log"),
        (lambda told: told["minValues"].update(run="q"), "has run r to r, q to r in the log"),
    ],
)
def test_file_that_differs_from_the_log_is_damage_and_not_repaired(left, change, said):
    rewrite_log(left, change)
    (finding,) = check(left).findings

    assert FindingKind.OTHER_CONTENT == finding.kind
    assert said in finding.text
    assert not check(left).is_intact
    assert not repair(left, sync_to_disk).changed


def test_torn_newest_entry_is_moved_away_without_losing_stored_rows(left):
    shutil.copy(newest_entry(left), left / "acknowledged")
    torn = left / LOG_FOLDER / f"{int(newest_entry(left).stem) + 1:020d}.json"
    torn.write_bytes(newest_entry(left).read_bytes()[:40])

    assert None is check(left).version
    assert [FindingKind.TORN_LOG] == kinds(left)
    assert torn.name == repair(left, sync_to_disk, dry_run=True).torn_entry
    assert torn.exists()
    assert torn.name == repair(left, sync_to_disk).torn_entry
    assert check(left).is_intact
    assert 15 == rows(left)


def test_torn_entry_before_later_entries_is_not_repaired(left):
    entry = sorted((left / LOG_FOLDER).glob("*.json"))[-2]
    entry.write_bytes(entry.read_bytes()[:30])

    assert [FindingKind.TORN_LOG] == kinds(left)
    with pytest.raises(StoreError, match="later entries exist"):
        repair(left, sync_to_disk)


def test_orphan_files_are_reported_and_are_no_damage(left):
    (data_files(left)[0].parent / "orphan.parquet").write_bytes(b"x" * 7)
    (left / "_staging" / "half.parquet").write_bytes(b"x")
    report = check(left)

    assert [FindingKind.UNUSED, FindingKind.STAGED] == [finding.kind for finding in report.findings]
    assert report.is_intact
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
    orphan = data_files(left)[0].parent / "orphan.parquet"
    orphan.write_bytes(b"x")
    os.utime(orphan, (0, 0))
    next(path for path in data_files(left) if path != orphan).unlink()

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


def test_missing_dataset_folder_is_removed_only_with_force(left):
    """A mount may be missing. If it came back after the repair, the store would not contain its files any more."""
    away = (left / "dataset=scalars").rename(left / "elsewhere")
    with pytest.raises(StoreError, match=r"^no file of scalars is left in .*dataset=scalars\. A disk or a mount may"):
        repair(left, sync_to_disk)
    (left / "dataset=scalars").mkdir()  # an empty mount point
    with pytest.raises(StoreError, match=r"^no file of scalars is left in .*dataset=scalars\. A disk or a mount may"):
        repair(left, sync_to_disk)
    (left / "dataset=scalars").rmdir()
    away.rename(left / "dataset=scalars")
    assert check(left).is_intact
    shutil.rmtree(left / "dataset=scalars")

    assert 3 == len(repair(left, sync_to_disk, force=True).lost)
    assert 0 == rows(left)


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
    row = {"run": ["r"], "name": ["loss"], "step": [100], "first_step": [100], "last_step": [199], "rows": [3]}
    writer.append(Batch(tables={"scalar_rollups": pa.table({**row, "value_count": [3]})}, watermarks={}))
    assert check(store.root, deep=True).is_intact
    writer.append(Batch(tables={"scalar_rollups": pa.table({**row, "value_count": [9]})}, watermarks={}))

    assert [FindingKind.OTHER_CONTENT] == kinds(store.root, deep=True)


def test_rows_stored_twice_and_missing_records_are_found(store, writer):
    row = {"run": ["r"], "incarnation": ["i"], "kind": ["k"], "tensor": ["t"]}
    for seq in (0, 1, 5):
        writer.append(Batch(tables={"tensor_stats": pa.table({**row, "seq": [seq]})}, watermarks={"i": seq}))
    (gap,) = check(store.root, deep=True).findings

    assert FindingKind.GAP == gap.kind
    assert "3 of seq 0 to 5 have no row" in gap.text
    path = data_files(store.root)[0]
    copy = path.with_name("copy.parquet")
    shutil.copy(path, copy)
    _add(store.root, copy)
    found = check(store.root, deep=True)
    assert FindingKind.DUPLICATES in [finding.kind for finding in found.findings]
    assert not found.is_intact


NUMBERED = sorted(DATASETS.keys() - {*DIMENSIONS, *ROLLUPS.values()})


@pytest.mark.usual(3)
@pytest.mark.parametrize("dataset", NUMBERED)
def test_record_stored_twice_is_found_in_every_dataset(store, writer, dataset):
    """Its copy arrived later, in a run with another name. Equal rows of one record are no copies."""
    texts = {field.name: field.name for field in DATASETS[dataset] if field.type == "string"}
    other = {name: f"another {name}" for name in texts}
    told = [
        {**each, "run": "r", "incarnation": "i", "seq": seq, "ts_origin": "ingest", "ts": 5, "ordinal": 1}
        for seq in range(3)
        for each in (texts, other)
    ]
    if dataset == "scalars":
        told.append(told[0])
    writer.append(
        Batch(tables={dataset: pa.Table.from_pylist(told, schema=dataset_schema(dataset))}, watermarks={"i": 2})
    )
    (path,) = data_files(store.root)

    assert () == check(store.root, deep=True).findings
    table = pq.ParquetFile(path).read()
    for name, value in (("run", "s"), ("ts", 6), ("ordinal", 9)):
        if name in table.column_names:
            changed = pa.array([value] * table.num_rows).cast(table.schema.field(name).type)
            table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), changed)
    copy = path.with_name(f"copy{path.name[4:]}")
    pq.write_table(table, copy)
    _add(store.root, copy)
    (finding,) = check(store.root, deep=True).findings

    assert (FindingKind.DUPLICATES, dataset) == (finding.kind, finding.path)
    assert f"{len(told)} rows more than" in finding.text


def test_record_with_only_two_equal_rows_is_reported_but_no_damage(store, writer):
    row = {"run": "r", "incarnation": "i", "seq": 0, "name": "loss", "value": 1.0}
    table = pa.Table.from_pylist([row, row], schema=dataset_schema("scalars"))
    writer.append(Batch(tables={"scalars": table}, watermarks={"i": 0}))
    report = check(store.root, deep=True)

    assert [FindingKind.ALIKE] == [finding.kind for finding in report.findings]
    assert report.is_intact


def test_moved_torn_entry_is_reported_also_if_files_are_unavailable(left):
    torn = left / LOG_FOLDER / f"{int(newest_entry(left).stem) + 1:020d}.json"
    torn.write_bytes(newest_entry(left).read_bytes()[:40])
    (left / "dataset=scalars").rename(left / "elsewhere")
    with pytest.raises(StoreError, match=rf"^{torn.name} moved to _damaged/\. no file of scalars is left"):
        repair(left, sync_to_disk)

    assert (left / DAMAGED / torn.name).exists()


def _add(root, path) -> None:
    log = Log.open(root, sync_to_disk)
    parts = path.relative_to(root)
    statistics = json.dumps({"numRecords": pq.read_metadata(path).num_rows})
    names = dict(part.split("=", 1) for part in parts.parts[:2])
    size = path.stat().st_size
    file = DataFile(path=str(parts), **names, rows=1, size_bytes=size, modified_at_ms=0, statistics=statistics)
    log.commit(Change(added=[file]))


def test_repair_refuses_while_a_service_runs_and_names_it(store, writer, batch):
    writer.append(batch(range(3)))
    data_files(store.root)[0].unlink()
    with pytest.raises(ShardLockError, match="host-a pid 1, which is running"):
        repair(store.root, sync_to_disk)

    assert not check(store.root).is_intact


def test_service_continues_after_a_repair(left, batch):
    data_files(left)[0].unlink()
    repair(left, sync_to_disk)
    with Store.open(left).claim(owner="next") as writer:
        writer.append(batch(range(5, 8), incarnation="new"))

    assert 13 == rows(left)


class Killed(BaseException):
    """Simulates a kill: the package does not catch it."""


@pytest.mark.thorough
def test_compaction_killed_at_any_fsync_can_be_repeated(left, monkeypatch):
    monkeypatch.setattr(compaction, "SMALL_FILES", 1)
    for moment in range(1, 30, 1 if THOROUGH else 3):
        copy = left.with_name(f"copy-{moment}")
        shutil.copytree(left, copy)
        done = _compact_until(copy, moment)

        assert 15 == rows(copy)
        assert check(copy, deep=True).is_intact
        compact(copy, sync_to_disk)
        assert (1, 15) == (check(copy).files, check(copy).rows)
        if done:
            break
    assert done
    assert moment > 4


def _compact_until(root, moment: int) -> bool:
    """Compact with a kill at the `moment`-th fsync; return whether it finished before."""
    left = [moment]

    def sync(path) -> None:
        left[0] -= 1
        if not left[0]:
            raise Killed
        sync_to_disk(path)

    try:
        compact(root, sync)
    except Killed:
        return False
    return True


def test_compaction_reports_its_progress(left, monkeypatch):
    monkeypatch.setattr(compaction, "SMALL_FILES", 1)
    told = []
    compact(left, sync_to_disk, lambda done, total: told.append((done, total)))

    assert [(1, 1)] == told


def test_stats_equal_those_of_the_files(left):
    found = store_stats(Log.open(left, sync_to_disk), by="run")
    sizes = sum(path.stat().st_size for path in data_files(left))

    assert (3, 15, sizes, 0) == (found.files, found.rows, found.size_bytes, found.unused_bytes)
    assert ("1970-01-01T00:00:00", "1970-01-01T00:00:14") == tuple(
        moment.replace(tzinfo=None).isoformat() for moment in (found.oldest, found.newest)
    )
    assert {"r": (2, 10), "first": (1, 5)} == {
        row["run"]: (row["files"], row["rows"]) for row in found.groups.to_pylist()
    }


def test_stats_are_grouped_by_tier(store, writer, batch):
    writer.append(batch(range(3)))
    table = pa.table({"run": ["r"], "name": ["loss"], "rows": [100]})
    writer.append(Batch(tables={"scalar_rollups": table}, watermarks={}))
    writer.append(Batch(tables={"runs": pa.table({"run": ["r"], "state": ["running"]})}, watermarks={}))
    groups = store_stats(Log.open(store.root, sync_to_disk), by="tier").groups.to_pylist()

    assert {"raw": 3, "rollups": 1, "kept for ever": 1} == {row["tier"]: row["rows"] for row in groups}


def test_bytes_per_sample_count_seven_statistics_per_row(store, writer):
    row = {"run": ["r"] * 10, "kind": ["k"] * 10, "tensor": ["t"] * 10, "seq": range(10), "incarnation": ["i"] * 10}
    writer.append(Batch(tables={"tensor_stats": pa.table(row)}, watermarks={"i": 9}))
    (figures,) = store_stats(Log.open(store.root, sync_to_disk), by="dataset").groups.to_pylist()

    assert 7 == len({*DEFAULT_OPS} - {"numel"})
    assert figures["bytes"] / 70 == figures["bytes_per_sample"]


def test_file_of_a_newer_schema_is_reported(left, monkeypatch):
    monkeypatch.setattr(checking, "SCHEMA_VERSION", 0)
    texts = [finding.text for finding in check(left).findings]

    assert 3 == sum("and this Rankscope supports up to 0" in text for text in texts)
