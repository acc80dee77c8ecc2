"""Behaviour of delta-rs and DuckDB that this package relies on. A new version of either must pass these tests.

Some of these tests describe hazards: the reasons for the design of `log/delta.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, CommitProperties, PostCommitHookProperties, RemoveAction, Transaction

from rankscope_contract.security.escaping import path_segment

COLUMNS = pa.schema([("dataset", pa.string()), ("part", pa.string()), ("run", pa.string()), ("step", pa.int64())])
ODD_NAMES = [
    "a/b",
    "..",
    "a=b",
    'it\'s "q"',
    "学习",
    "123",
    "2026-11-20",
    "",
    " ",
    "%41",
    "a b",
    "a%2Fb",
    "C:\\x",
    "#?&",
]


def create(folder: Path, **configuration: str) -> DeltaTable:
    return DeltaTable.create(
        str(folder),
        schema=Schema.from_arrow(COLUMNS),
        partition_by=["dataset", "part"],
        configuration={f"delta.{name}": value for name, value in configuration.items()},
    )


def add(folder: Path, name: str, *, run: str = "r", rows: int = 3, data_change: bool = True) -> AddAction:
    path = f"dataset=d/part={path_segment(run)}/{name}.parquet"
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"run": [run] * rows, "step": list(range(rows))}), folder / path)
    ranges = {"minValues": {"run": run, "step": 0}, "maxValues": {"run": run, "step": rows - 1}}
    statistics = json.dumps({"numRecords": rows, **ranges, "nullCount": {"run": 0, "step": 0}})
    size = (folder / path).stat().st_size
    now = time.time_ns() // 1_000_000
    return AddAction(path, size, {"dataset": "d", "part": path_segment(run)}, now, data_change, statistics)


def remove(action: AddAction, *, hours_ago: float = 0, data_change: bool = False) -> RemoveAction:
    return RemoveAction(
        path=action.path,
        data_change=data_change,
        deletion_timestamp=time.time_ns() // 1_000_000 - int(hours_ago * 3_600_000),
        partition_values=dict(action.partition_values),
        size=action.size,
    )


def commit(
    table: DeltaTable,
    *actions: AddAction | RemoveAction,
    transactions: Mapping[str, int] | None = None,
    info: Mapping[str, str] | None = None,
    schema: Schema | None = None,
) -> None:
    table.create_write_transaction(
        list(actions),
        mode="append",
        schema=schema or table.schema(),
        partition_by=["dataset", "part"],
        commit_properties=CommitProperties(
            custom_metadata=dict(info or {}),
            app_transactions=[Transaction(name, number) for name, number in (transactions or {}).items()],
        ),
        post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
    )


def rows(folder: Path) -> int:
    actions = pa.table(DeltaTable(str(folder)).get_add_actions(flatten=True))
    return sum(actions.column("num_records").to_pylist())


def test_delta_lets_two_rewrites_of_a_file_succeed_and_double_its_rows(tmp_path):
    """The mutex of rewrites prevents this."""
    table = create(tmp_path)
    original = add(tmp_path, "original")
    commit(table, original)
    one, other = DeltaTable(str(tmp_path)), DeltaTable(str(tmp_path))
    commit(one, add(tmp_path, "rewrite-1", data_change=False), remove(original))
    commit(other, add(tmp_path, "rewrite-2", data_change=False), remove(original))

    assert 6 == rows(tmp_path)


def test_transaction_as_mutex_refuses_the_second_rewrite(tmp_path):
    table = create(tmp_path)
    original = add(tmp_path, "original")
    commit(table, original)
    one, other = DeltaTable(str(tmp_path)), DeltaTable(str(tmp_path))
    commit(one, add(tmp_path, "rewrite-1", data_change=False), remove(original), transactions={"compact": 1})
    with pytest.raises(CommitFailedError, match="Concurrent transaction"):
        commit(other, add(tmp_path, "rewrite-2", data_change=False), remove(original), transactions={"compact": 1})

    assert 3 == rows(tmp_path)


def test_append_succeeds_during_a_concurrent_rewrite(tmp_path):
    table = create(tmp_path)
    original = add(tmp_path, "original")
    commit(table, original)
    compactor, appender = DeltaTable(str(tmp_path)), DeltaTable(str(tmp_path))
    commit(appender, add(tmp_path, "appended"), transactions={"ingest:0/1": 1})
    commit(compactor, add(tmp_path, "rewrite", data_change=False), remove(original), transactions={"compact": 1})

    assert 6 == rows(tmp_path)


def test_moved_transaction_refuses_a_commit_of_a_stale_handle(tmp_path):
    create(tmp_path)
    owner, zombie = DeltaTable(str(tmp_path)), DeltaTable(str(tmp_path))
    commit(owner, transactions={"ingest:0/1": 1})
    with pytest.raises(CommitFailedError, match="Concurrent transaction"):
        commit(zombie, add(tmp_path, "late"), transactions={"ingest:0/1": 1})

    assert 0 == rows(tmp_path)


def test_fresh_handle_accepts_a_repeated_transaction(tmp_path):
    """The log stores the number but does not compare it. A writer must therefore read it before a commit."""
    create(tmp_path)
    for number in (5, 5, 3):
        commit(DeltaTable(str(tmp_path)), transactions={"ingest:0/1": number})

    assert 3 == DeltaTable(str(tmp_path)).transaction_version("ingest:0/1")


def test_commit_can_contain_only_transactions(tmp_path):
    commit(create(tmp_path), transactions={"ingest:0/1": 1})

    assert 1 == DeltaTable(str(tmp_path)).version()


def test_unknown_transaction_is_none(tmp_path):
    assert create(tmp_path).transaction_version("w:nobody") is None


def test_handle_keeps_its_version_after_its_own_commit(tmp_path):
    table = create(tmp_path)
    commit(table, transactions={"w:i": 7})

    assert (0, None) == (table.version(), table.transaction_version("w:i"))

    table.update_incremental()

    assert (1, 7) == (table.version(), table.transaction_version("w:i"))


def test_entry_names_have_20_digits_and_transactions_separate_lines(tmp_path):
    """`Log.changed_transactions` and `Log.make_durable` rely on this format."""
    commit(create(tmp_path), add(tmp_path, "a"), transactions={"w:i": 7, "ingest:0/1": 2})
    lines = (tmp_path / "_delta_log" / "00000000000000000001.json").read_text().splitlines()
    found = [json.loads(line)["txn"] for line in lines if line.startswith('{"txn"')]

    assert {"w:i": 7, "ingest:0/1": 2} == {line["appId"]: line["version"] for line in found}


def test_transactions_and_files_survive_checkpoint_and_clean_up(tmp_path):
    table = create(tmp_path, logRetentionDuration="interval 1 second", checkpointInterval="5")
    for number in range(12):
        commit(table, add(tmp_path, f"f{number}"), transactions={f"w:{number}": number})
        table.update_incremental()
    entries = sorted((tmp_path / "_delta_log").glob("*.json"))
    for entry in entries:
        os.utime(entry, (1, 1))
    table.create_checkpoint()
    table.cleanup_metadata()
    fresh = DeltaTable(str(tmp_path))

    assert len(entries) > len(list((tmp_path / "_delta_log").glob("*.json")))
    assert list(range(12)) == [fresh.transaction_version(f"w:{number}") for number in range(12)]
    assert 36 == rows(tmp_path)


def test_old_handle_refreshes_although_entries_were_cleaned_up(tmp_path):
    """For example a connection that was idle during maintenance."""
    table = create(tmp_path, logRetentionDuration="interval 1 second", checkpointInterval="5")
    sleeper = DeltaTable(str(tmp_path))
    for number in range(12):
        commit(table, add(tmp_path, f"f{number}"))
        table.update_incremental()
    for entry in (tmp_path / "_delta_log").glob("*.json"):
        os.utime(entry, (1, 1))
    table.create_checkpoint()
    table.cleanup_metadata()
    sleeper.update_incremental()

    assert (12, 12) == (sleeper.version(), len(sleeper.file_uris()))


def test_delta_hook_writes_checkpoints_without_clean_up(tmp_path):
    table = create(tmp_path, logRetentionDuration="interval 1 second", checkpointInterval="5")
    for number in range(10):
        commit(table, transactions={"w:i": number})
        table.update_incremental()
        for entry in (tmp_path / "_delta_log").glob("*.json"):
            os.utime(entry, (1, 1))

    assert 11 == len(list((tmp_path / "_delta_log").glob("*.json")))
    assert list((tmp_path / "_delta_log").glob("*.checkpoint.parquet"))


def test_commit_information_is_in_the_history(tmp_path):
    table = create(tmp_path)
    commit(table, info={"rankscopeOwner": "host pid 1"})

    assert "host pid 1" == DeltaTable(str(tmp_path)).history(1)[0]["rankscopeOwner"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_plain_path_with_any_run_name_is_found_again(tmp_path, name):
    table = create(tmp_path)
    action = add(tmp_path, "f", run=name)
    commit(table, action)
    table.update_incremental()

    assert [str(tmp_path / action.path)] == table.file_uris()
    assert [True] == [Path(uri).exists() for uri in table.file_uris()]

    commit(table, remove(action), transactions={"compact": 1})
    table.update_incremental()

    assert [] == table.file_uris()


@pytest.mark.parametrize("name", ODD_NAMES)
def test_vacuum_never_lists_a_live_file_with_any_run_name(tmp_path, name):
    table = create(tmp_path)
    action = add(tmp_path, "f", run=name)
    commit(table, action)
    os.utime(tmp_path / action.path, (1, 1))
    table.update_incremental()

    assert [] == table.vacuum(retention_hours=0, dry_run=True, full=True, enforce_retention_duration=False)


def test_full_vacuum_lists_old_removed_orphan_and_unknown_files(tmp_path):
    """`Log.unused_files` therefore filters a dry run: delta-rs does not know `rankscope.sql`."""
    table = create(tmp_path, deletedFileRetentionDuration="interval 2 hours")
    removed, just_removed, kept = (add(tmp_path, name) for name in ("removed", "just-removed", "kept"))
    commit(table, removed, just_removed, kept)
    table.update_incremental()
    commit(table, remove(removed, hours_ago=3), remove(just_removed))
    table.update_incremental()
    add(tmp_path, "young-orphan")
    add(tmp_path, "old-orphan")
    (tmp_path / "_staging").mkdir()
    (tmp_path / "_staging" / "hidden.parquet").touch()
    (tmp_path / "rankscope.sql").touch()
    for path in (removed.path, just_removed.path, kept.path, "rankscope.sql", "_staging/hidden.parquet"):
        os.utime(tmp_path / path, (1, 1))
    os.utime(tmp_path / removed.path.replace("removed", "old-orphan"), (1, 1))
    found = table.vacuum(retention_hours=2, dry_run=True, full=True, enforce_retention_duration=False)

    assert {"removed.parquet", "old-orphan.parquet", "rankscope.sql"} == {name.rsplit("/", 1)[-1] for name in found}


def test_wider_schema_in_a_commit_is_accepted_but_not_added(tmp_path):
    table = create(tmp_path)
    wider = Schema.from_arrow(COLUMNS.append(pa.field("new", pa.int64())))
    commit(table, transactions={"w:i": 1}, schema=wider)
    table.update_incremental()

    assert "new" not in [field.name for field in table.schema().fields]


def test_added_column_refuses_an_append_of_an_older_handle(tmp_path):
    table = create(tmp_path)
    appender = DeltaTable(str(tmp_path))
    table.alter.add_columns(Schema.from_arrow(pa.schema([pa.field("new", pa.int64())])).fields)
    with pytest.raises(CommitFailedError, match=r"(?i)metadata"):
        commit(appender, add(tmp_path, "late"))

    assert "new" in [field.name for field in DeltaTable(str(tmp_path)).schema().fields]


def test_empty_newest_entry_is_a_commit_without_actions(tmp_path):
    table = create(tmp_path)
    commit(table, add(tmp_path, "kept"))
    (tmp_path / "_delta_log" / "00000000000000000002.json").touch()

    assert (2, 3) == (DeltaTable(str(tmp_path)).version(), rows(tmp_path))


def test_torn_newest_entry_raises_the_expected_message(tmp_path):
    table = create(tmp_path)
    commit(table, add(tmp_path, "kept"))
    entry = tmp_path / "_delta_log" / "00000000000000000001.json"
    entry.write_text(entry.read_text()[:200])
    with pytest.raises(DeltaError, match="Json error"):
        DeltaTable(str(tmp_path))


def test_copied_store_opens_at_its_new_path(tmp_path):
    table = create(tmp_path / "a")
    commit(table, add(tmp_path / "a", "f"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")

    assert [str(tmp_path / "b" / "dataset=d/part=r/f.parquet")] == DeltaTable(str(tmp_path / "b")).file_uris()


# --- DuckDB


@pytest.fixture
def database():
    with duckdb.connect() as database:
        yield database


def write(path: Path, **columns: list[int]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_view_over_a_variable_uses_its_current_value(database, tmp_path):
    one, other = write(tmp_path / "1.parquet", a=[1]), write(tmp_path / "2.parquet", a=[2])
    database.execute(f"SET VARIABLE f = ['{one}']")
    database.execute("CREATE VIEW v AS SELECT * FROM read_parquet(getvariable('f'))")
    database.execute(f"SET VARIABLE f = ['{one}', '{other}']")

    assert [(1,), (2,)] == database.sql("SELECT a FROM v ORDER BY a").fetchall()


def test_deleted_file_of_a_view_is_an_error_and_never_fewer_rows(database, tmp_path):
    kept, gone = write(tmp_path / "1.parquet", a=[1]), write(tmp_path / "2.parquet", a=[2])
    Path(gone).unlink()
    with pytest.raises(duckdb.IOException):
        database.sql(f"SELECT a FROM read_parquet(['{kept}', '{gone}'])").fetchall()


def test_empty_list_of_files_is_an_error(database):
    with pytest.raises(duckdb.Error):
        database.sql("SELECT * FROM read_parquet([]::VARCHAR[])").fetchall()


def test_file_without_a_column_needs_union_by_name(database, tmp_path):
    files = [write(tmp_path / "1.parquet", a=[1], b=[1]), write(tmp_path / "2.parquet", a=[2])]
    with pytest.raises(duckdb.Error):
        database.sql(f"SELECT b FROM read_parquet({files})").fetchall()

    assert [(1, 1), (2, None)] == database.sql(
        f"SELECT a, b FROM read_parquet({files}, union_by_name = true) ORDER BY a"
    ).fetchall()


@pytest.mark.parametrize(("name", "guessed"), [("123", "BIGINT"), ("2026-11-20", "DATE"), ("x", "VARCHAR")])
def test_duckdb_guesses_the_type_of_a_partition_value(database, tmp_path, name, guessed):
    """Views therefore use no hive partitioning: `run` is a column of the file."""
    file = write(tmp_path / f"part={name}" / "1.parquet", a=[1])
    typed = f"SELECT typeof(part) FROM read_parquet('{file}', hive_partitioning = true, hive_types = {{part: VARCHAR}})"

    assert [(guessed,)] == database.sql(f"SELECT typeof(part) FROM read_parquet('{file}')").fetchall()
    assert [("VARCHAR",)] == database.sql(typed).fetchall()
    assert ["a"] == database.sql(f"SELECT * FROM read_parquet('{file}', hive_partitioning = false)").columns


def test_allowed_directories_permits_reads_and_writes_only_there(database, tmp_path):
    """Because writes are possible, a locked connection also checks the kind of every statement."""
    inside, outside = write(tmp_path / "in" / "1.parquet", a=[1]), write(tmp_path / "2.parquet", a=[2])
    database.execute(f"SET allowed_directories = ['{tmp_path}/in/']")
    database.execute("SET enable_external_access = false; SET lock_configuration = true")
    for forbidden in (
        f"SELECT * FROM '{outside}'",
        f"SELECT * FROM '{tmp_path}/in/../2.parquet'",
        f"COPY (SELECT 1) TO '{tmp_path}/x.csv'",
        "SELECT * FROM read_text('/etc/passwd')",
    ):
        with pytest.raises(duckdb.PermissionException):
            database.sql(forbidden).fetchall()
    database.execute(f"COPY (SELECT 1) TO '{tmp_path}/in/x.csv'")
    database.execute("SET VARIABLE still = 1")

    assert [(1,)] == database.sql(f"SELECT * FROM '{inside}'").fetchall()
    with pytest.raises(duckdb.InvalidInputException):
        database.execute("SET enable_external_access = true")
