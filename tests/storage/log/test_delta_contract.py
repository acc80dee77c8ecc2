"""What we lean on in delta-rs and DuckDB. A new version of either must pass here before it may come in.

Some of these tests pin hazards rather than features: they are why `log.py` does what it does.
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


def test_two_rewrites_of_one_file_both_succeed_and_double_its_rows(tmp_path):
    """The hazard that the mutex is for."""
    table = create(tmp_path)
    original = add(tmp_path, "original")
    commit(table, original)
    one, other = DeltaTable(str(tmp_path)), DeltaTable(str(tmp_path))
    commit(one, add(tmp_path, "rewrite-1", data_change=False), remove(original))
    commit(other, add(tmp_path, "rewrite-2", data_change=False), remove(original))

    assert 6 == rows(tmp_path)


def test_a_transaction_as_mutex_refuses_the_second_rewrite(tmp_path):
    table = create(tmp_path)
    original = add(tmp_path, "original")
    commit(table, original)
    one, other = DeltaTable(str(tmp_path)), DeltaTable(str(tmp_path))
    commit(one, add(tmp_path, "rewrite-1", data_change=False), remove(original), transactions={"compact": 1})
    with pytest.raises(CommitFailedError, match="Concurrent transaction"):
        commit(other, add(tmp_path, "rewrite-2", data_change=False), remove(original), transactions={"compact": 1})

    assert 3 == rows(tmp_path)


def test_an_append_passes_a_concurrent_rewrite(tmp_path):
    table = create(tmp_path)
    original = add(tmp_path, "original")
    commit(table, original)
    compactor, appender = DeltaTable(str(tmp_path)), DeltaTable(str(tmp_path))
    commit(appender, add(tmp_path, "appended"), transactions={"ingest:0/1": 1})
    commit(compactor, add(tmp_path, "rewrite", data_change=False), remove(original), transactions={"compact": 1})

    assert 6 == rows(tmp_path)


def test_a_stale_handle_is_fenced_by_a_transaction_that_moved(tmp_path):
    create(tmp_path)
    owner, zombie = DeltaTable(str(tmp_path)), DeltaTable(str(tmp_path))
    commit(owner, transactions={"ingest:0/1": 1})
    with pytest.raises(CommitFailedError, match="Concurrent transaction"):
        commit(zombie, add(tmp_path, "late"), transactions={"ingest:0/1": 1})

    assert 0 == rows(tmp_path)


def test_a_fresh_handle_accepts_a_repeated_transaction(tmp_path):
    """So a writer must look before it commits: the log records the number, it does not compare it."""
    create(tmp_path)
    for number in (5, 5, 3):
        commit(DeltaTable(str(tmp_path)), transactions={"ingest:0/1": number})

    assert 3 == DeltaTable(str(tmp_path)).transaction_version("ingest:0/1")


def test_a_commit_may_hold_transactions_alone(tmp_path):
    commit(create(tmp_path), transactions={"ingest:0/1": 1})

    assert 1 == DeltaTable(str(tmp_path)).version()


def test_an_unknown_transaction_is_none(tmp_path):
    assert create(tmp_path).transaction_version("w:nobody") is None


def test_a_handle_stays_where_it_was_after_its_own_commit(tmp_path):
    table = create(tmp_path)
    commit(table, transactions={"w:i": 7})

    assert (0, None) == (table.version(), table.transaction_version("w:i"))

    table.update_incremental()

    assert (1, 7) == (table.version(), table.transaction_version("w:i"))


def test_entries_have_twenty_digits_and_transactions_on_lines_of_their_own(tmp_path):
    """`Log.changed_transactions` reads them so, and `make_durable` finds them so."""
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


def test_an_old_handle_catches_up_over_entries_that_were_cleaned_up(tmp_path):
    """A connection that slept through a maintenance."""
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


def test_a_checkpoint_is_made_every_so_many_commits_without_cleaning_up(tmp_path):
    table = create(tmp_path, logRetentionDuration="interval 1 second", checkpointInterval="5")
    for number in range(10):
        commit(table, transactions={"w:i": number})
        table.update_incremental()
        for entry in (tmp_path / "_delta_log").glob("*.json"):
            os.utime(entry, (1, 1))

    assert 11 == len(list((tmp_path / "_delta_log").glob("*.json")))
    assert list((tmp_path / "_delta_log").glob("*.checkpoint.parquet"))


def test_what_a_commit_says_of_itself_stands_in_the_history(tmp_path):
    table = create(tmp_path)
    commit(table, info={"rankscopeOwner": "host pid 1"})

    assert "host pid 1" == DeltaTable(str(tmp_path)).history(1)[0]["rankscopeOwner"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_path_is_given_plain_and_found_again_whatever_the_run_is_called(tmp_path, name):
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
def test_a_live_file_is_never_called_unused_whatever_the_run_is_called(tmp_path, name):
    table = create(tmp_path)
    action = add(tmp_path, "f", run=name)
    commit(table, action)
    os.utime(tmp_path / action.path, (1, 1))
    table.update_incremental()

    assert [] == table.vacuum(retention_hours=0, dry_run=True, full=True, enforce_retention_duration=False)


def test_a_full_vacuum_would_take_removed_files_orphans_and_strangers_but_nothing_young_or_hidden(tmp_path):
    """Hence a dry run whose list we filter: `rankscope.sql` is a stranger to delta-rs."""
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


def test_a_wider_schema_in_a_commit_is_accepted_but_not_added(tmp_path):
    table = create(tmp_path)
    wider = Schema.from_arrow(COLUMNS.append(pa.field("new", pa.int64())))
    commit(table, transactions={"w:i": 1}, schema=wider)
    table.update_incremental()

    assert "new" not in [field.name for field in table.schema().fields]


def test_an_added_column_refuses_an_append_from_before(tmp_path):
    table = create(tmp_path)
    appender = DeltaTable(str(tmp_path))
    table.alter.add_columns(Schema.from_arrow(pa.schema([pa.field("new", pa.int64())])).fields)
    with pytest.raises(CommitFailedError, match=r"(?i)metadata"):
        commit(appender, add(tmp_path, "late"))

    assert "new" in [field.name for field in DeltaTable(str(tmp_path)).schema().fields]


def test_an_empty_newest_entry_reads_as_a_commit_of_nothing(tmp_path):
    table = create(tmp_path)
    commit(table, add(tmp_path, "kept"))
    (tmp_path / "_delta_log" / "00000000000000000002.json").touch()

    assert (2, 3) == (DeltaTable(str(tmp_path)).version(), rows(tmp_path))


def test_a_torn_newest_entry_is_refused_with_the_words_we_look_for(tmp_path):
    table = create(tmp_path)
    commit(table, add(tmp_path, "kept"))
    entry = tmp_path / "_delta_log" / "00000000000000000001.json"
    entry.write_text(entry.read_text()[:200])
    with pytest.raises(DeltaError, match="Json error"):
        DeltaTable(str(tmp_path))


def test_a_copied_store_opens_at_its_new_place(tmp_path):
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


def test_a_view_over_a_variable_follows_it(database, tmp_path):
    one, other = write(tmp_path / "1.parquet", a=[1]), write(tmp_path / "2.parquet", a=[2])
    database.execute(f"SET VARIABLE f = ['{one}']")
    database.execute("CREATE VIEW v AS SELECT * FROM read_parquet(getvariable('f'))")
    database.execute(f"SET VARIABLE f = ['{one}', '{other}']")

    assert [(1,), (2,)] == database.sql("SELECT a FROM v ORDER BY a").fetchall()


def test_a_listed_file_that_has_gone_is_an_error_and_never_fewer_rows(database, tmp_path):
    kept, gone = write(tmp_path / "1.parquet", a=[1]), write(tmp_path / "2.parquet", a=[2])
    Path(gone).unlink()
    with pytest.raises(duckdb.IOException):
        database.sql(f"SELECT a FROM read_parquet(['{kept}', '{gone}'])").fetchall()


def test_an_empty_list_of_files_is_an_error(database):
    with pytest.raises(duckdb.Error):
        database.sql("SELECT * FROM read_parquet([]::VARCHAR[])").fetchall()


def test_a_file_that_lacks_a_column_needs_union_by_name(database, tmp_path):
    files = [write(tmp_path / "1.parquet", a=[1], b=[1]), write(tmp_path / "2.parquet", a=[2])]
    with pytest.raises(duckdb.Error):
        database.sql(f"SELECT b FROM read_parquet({files})").fetchall()

    assert [(1, 1), (2, None)] == database.sql(
        f"SELECT a, b FROM read_parquet({files}, union_by_name = true) ORDER BY a"
    ).fetchall()


@pytest.mark.parametrize(("name", "guessed"), [("123", "BIGINT"), ("2026-11-20", "DATE"), ("x", "VARCHAR")])
def test_a_partition_value_is_guessed_unless_its_type_is_given(database, tmp_path, name, guessed):
    """Hence no hive partitioning in our views: `run` is a column of the file."""
    file = write(tmp_path / f"part={name}" / "1.parquet", a=[1])
    typed = f"SELECT typeof(part) FROM read_parquet('{file}', hive_partitioning = true, hive_types = {{part: VARCHAR}})"

    assert [(guessed,)] == database.sql(f"SELECT typeof(part) FROM read_parquet('{file}')").fetchall()
    assert [("VARCHAR",)] == database.sql(typed).fetchall()
    assert ["a"] == database.sql(f"SELECT * FROM read_parquet('{file}', hive_partitioning = false)").columns


def test_an_allowed_folder_is_readable_and_writable_and_nothing_else_is(database, tmp_path):
    """Writable: which is why a locked connection also looks at the kind of every statement."""
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
