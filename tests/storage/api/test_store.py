"""Open and claim a store: every error names the remedy; runs, summaries and anomalies of a small store."""

import datetime as dt
import errno
import fcntl
import json
import math
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema
from tests.properties import few
from tests.storage.rows import ask, entries
from tests.storage.rows import put as append

from rankscope_storage.api import summaries
from rankscope_storage.api.store import Store
from rankscope_storage.base.errors import (
    NotAStoreError,
    SchemaVersionError,
    ShardLockError,
    ShardLostError,
    StoreError,
    UnwritableError,
)
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import STORE_VERSION
from rankscope_storage.connection import connect
from rankscope_storage.log import delta as log_module
from rankscope_storage.log.delta import Change, Log
from rankscope_storage.log.shard_lock import ShardLock, shard_transaction
from rankscope_storage.maintenance.check import FindingKind, check
from rankscope_storage.maintenance.repair import repair
from rankscope_view.data.incidents import incidents

NO_LINKS = Path(__file__).with_name("no_links.py")
COUNT = "SELECT count(*) FROM scalars"


def test_store_is_created_only_with_create(folder):
    for opening in (Store.open, connect):
        with pytest.raises(NotAStoreError, match="rankscope serve"):
            opening(folder)

    assert not folder.exists()
    (folder / log_module.LOG_FOLDER).mkdir(parents=True)  # an interrupted creation is completed
    assert folder == Store.open(folder, create=True).root
    assert 0 == Log.open(folder, sync_to_disk).version
    assert folder == Store.open(folder).root
    assert folder == Store.open(folder, create=True).root


def test_file_and_unrelated_delta_table_are_no_stores(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotAStoreError, match="is a file"):
        Store.open(tmp_path / "file", create=True)
    with pytest.raises(UnwritableError, match="cannot write to"):
        Store.open(tmp_path / "file" / "store", create=True)
    DeltaTable.create(str(tmp_path), schema=Schema.from_arrow(pa.schema([("a", pa.int64())])))
    with pytest.raises(NotAStoreError, match="not a Rankscope store"):
        Store.open(tmp_path)


def test_folder_without_write_permission_is_reported(tmp_path):
    """Run as another user, because permissions do not restrict root."""
    program = textwrap.dedent(
        f"""
        import os, pathlib
        from rankscope_storage.api.store import Store
        if os.geteuid() == 0:
            os.setuid(65534)
        Store.open({str(tmp_path / "store")!r}, create=True)
        """
    )
    tmp_path.chmod(0o555)
    for parent in tmp_path.parents:
        if os.geteuid() == 0 and str(parent).startswith("/tmp/pytest"):
            parent.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert "UnwritableError: cannot write to" in done.stderr


def test_unreadable_parent_folder_is_reported(folder, monkeypatch):
    def denied(path: Path, **_: object) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(UnwritableError, match=f"cannot access {folder}: Permission denied"):
        Store.open(folder)


def test_folder_without_hard_links_is_reported_at_open(folder):
    program = f"from rankscope_storage.api.store import Store\nStore.open({str(folder)!r}, create=True)"
    done = subprocess.run([sys.executable, NO_LINKS, program], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this kernel lets no process install a seccomp filter")
    assert "UnwritableError" in done.stderr
    assert "file system without hard links" in done.stderr
    assert not (folder / "_delta_log").exists()


def test_newer_schema_version_asks_for_an_upgrade(store, monkeypatch):
    table = DeltaTable(str(store.root))
    table.alter.set_table_properties({"rankscope.schema_version": str(STORE_VERSION + 1)}, raise_if_not_exists=False)
    for opening in (lambda: Store.open(store.root), lambda: connect(store.root)):
        with pytest.raises(SchemaVersionError, match="upgrade"):
            opening()


def test_claim_adds_columns_of_a_newer_schema(store, monkeypatch, batch):
    """A service of the older release, which owns another shard, continues to append."""
    wider = log_module.table_schema().append(pa.field("brand_new", pa.int64()))
    with store.claim("0/2", owner="older") as older:
        monkeypatch.setattr(log_module, "table_schema", lambda: wider)
        with store.claim("1/2", owner="newer") as writer:
            writer.append(batch(range(3)))
        older.append(batch(range(2), incarnation="i1"))

    assert "brand_new" in [field.name for field in DeltaTable(str(store.root)).schema().fields]
    assert [(5,)] == ask(store.root, COUNT)


def test_empty_last_entry_is_a_commit_without_actions(store, batch):
    """The state if power fails between the creation of the file and its content. It is no damage."""
    with store.claim(owner="me") as writer:
        writer.append(batch(range(3)))
        writer.append(batch(range(3, 6)))
    entries(store.root)[-1].write_bytes(b"")
    found = [finding.kind for finding in check(store.root).findings if "_delta_log" in finding.path]
    with Store.open(store.root).claim(owner="me") as writer, connect(store.root) as connection:
        writer.append(batch(range(6)))

        assert [(6,)] == ask(connection, COUNT)
    report = check(store.root)

    assert [FindingKind.EMPTY_ENTRY] == found
    assert FindingKind.EMPTY_ENTRY in [finding.kind for finding in report.findings]
    assert report.is_intact
    assert None is repair(store.root, sync_to_disk).torn_entry


def test_unreadable_log_raises_a_message_of_one_line(store):
    (store.root / "_delta_log" / "00000000000000000000.json").write_text('{"protocol":{"minReaderVersion":99}}\n')
    with pytest.raises(StoreError) as raised:
        Store.open(store.root)

    assert "\n" not in str(raised.value)


# --- claims


def test_second_claim_of_a_locked_shard_names_the_running_owner(store, writer):
    with pytest.raises(ShardLockError, match="host-a pid 1, which is running"):
        store.claim(owner="host-b pid 2")


def claim_as_from_another_machine(store: Store, owner: str):
    """Claim without access to the lock file of the owner: only the transaction numbers in the log decide."""
    for lock in (store.root / "_shards").iterdir():
        lock.unlink()
    return store.claim(owner=owner)


def test_owner_on_another_machine_stops_at_its_next_append(store, writer, batch, connection):
    writer.append(batch(range(3)))
    with claim_as_from_another_machine(store, "host-b pid 2") as successor:
        with pytest.raises(ShardLostError, match="host-b pid 2"):
            writer.append(batch(range(3, 6)))
        with pytest.raises(ShardLostError):
            writer.watermark("i0")
        successor.append(batch(range(6)))

    assert [(6, 6)] == ask(connection, "SELECT count(*), count(DISTINCT seq) FROM scalars")


def test_claim_between_refresh_and_commit_refuses_the_commit(store, writer, batch, monkeypatch):
    writer.append(batch(range(3)))
    before = set(store.root.rglob("*.parquet"))
    genuine = writer._write

    def claimed_meanwhile(*arguments):
        files = genuine(*arguments)
        claim_as_from_another_machine(store, "host-b pid 2")
        return files

    monkeypatch.setattr(writer, "_write", claimed_meanwhile)
    with pytest.raises(ShardLostError, match="host-b pid 2"):
        writer.append(batch(range(3, 6)))

    assert before == set(store.root.rglob("*.parquet"))


def test_loser_of_two_concurrent_claims_names_the_winner(store, monkeypatch):
    genuine = Log.commit

    def overtaken(log: Log, change: Change) -> int:
        rival = Log.open(store.root, sync_to_disk)
        name = shard_transaction("0/1")
        genuine(rival, Change(transactions={name: 1}, info={"rankscopeShard": "0/1", "rankscopeOwner": "rival pid 9"}))
        return genuine(log, change)

    monkeypatch.setattr(Log, "commit", overtaken)
    with pytest.raises(ShardLockError, match="rival pid 9"):
        store.claim(owner="me")
    monkeypatch.undo()

    store.claim(owner="me").close()  # the loser released its lock


def test_without_file_locks_the_log_decides(store, monkeypatch, batch):
    def no_locks(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("rankscope_storage.log.shard_lock.fcntl.flock", no_locks)
    first, second = store.claim(owner="a"), store.claim(owner="b")
    with pytest.raises(ShardLostError, match="taken over by b"):
        first.append(batch(range(3)))

    assert 3 == second.append(batch(range(3))).rows["scalars"]


def test_shard_must_be_i_of_n_and_its_lock_must_be_writable(store):
    for shard in ("", "1", "1/1", "a/b", "-1/2", "0/0", "../x"):
        with pytest.raises(ShardLockError, match="i/N"):
            store.claim(shard, owner="me")
    (store.root / "_shards").write_text("in the way")
    with pytest.raises(UnwritableError, match="cannot write"):
        store.claim(owner="me")


def test_path_that_would_be_misread_is_refused_with_the_character(tmp_path):
    """DuckDB would read other stores that match the pattern; delta-rs would write to another folder."""
    for path in (tmp_path / name for name in ("a*b", "a?b", "a[1]", "a%20b", "a\\b", "a\nb")):
        for opening in (lambda path=path: Store.open(path / "store", create=True), lambda path=path: connect(path)):
            with pytest.raises(StoreError, match="choose a path without"):
                opening()


@pytest.mark.parametrize(
    "name", few(2, ["a b", "a'b", "100%", "学习", "a#b", "a=b", 'a"b', "{a}", "~x", "a:b", "a,b", "$HOME"])
)
def test_any_other_path_works_for_every_reader(tmp_path, name, batch):
    root = tmp_path / name / "store"
    with Store.open(root, create=True).claim(owner="test") as writer:
        writer.append(batch(range(3)))
        writer.maintain()
    plain = duckdb.connect()
    plain.execute((root / "rankscope.sql").read_text(encoding="utf-8"))
    with connect(root, locked=True) as connection:
        assert [[(3,)], [(3,)]] == [ask(plain, COUNT), ask(connection, COUNT)]


@pytest.mark.parametrize("before", ["its predecessor", ""])
def test_lock_just_taken_is_reported_with_the_new_owner(store, before):
    """A process writes its name after it took the lock; until then, the file has an older name or none."""
    ShardLock.take(store.root, "0/1", before).release()
    (path,) = (store.root / "_shards").glob("*.lock")
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        naming = threading.Timer(0.03, path.write_text, ["host-b pid 2"])
        naming.start()
        with pytest.raises(ShardLockError, match="host-b pid 2, which is running"):
            store.claim(owner="me")
        naming.join()


def test_lock_without_a_name_on_a_full_disk_is_valid(folder, monkeypatch):
    store = Store.open(folder, create=True)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", refuse)
    with store.claim(owner="first"), pytest.raises(ShardLockError, match="an unnamed process"):
        store.claim(owner="second")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("gs://bucket/history", "unknown scheme gs: a store is a local folder, or s3://bucket/prefix"),
        (Path("file:///data/history"), "unknown scheme file"),
        ("s3://", "not a valid location: write s3://bucket/prefix"),
        ("s3://Bucket/history", "not a valid location"),
        ("s3://bucket/a/../b", "not a valid location"),
        ("s3://bucket/a b", "not a valid location"),
    ],
)
def test_url_of_another_kind_is_refused_and_creates_nothing(path, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for opening in (lambda: Store.open(path, create=True), lambda: connect(path)):
        with pytest.raises(NotAStoreError, match=words):
            opening()

    assert [] == list(tmp_path.iterdir())


# Runs, summaries and anomalies of a small hand-written store.

START = dt.datetime(2026, 11, 20, 12, tzinfo=dt.UTC)


@pytest.fixture
def put(writer):
    """Append rows given as dicts, without incarnation, so that none is dropped."""
    return lambda dataset, *rows, run="r": append(writer, dataset, rows, run=run)


def scalar(name: str, step: int, value: float, **columns) -> dict:
    return {"attempt": 0, "rank": 0, "step": step, "name": name, "value": value, **columns}


def anomaly(step: int | None, **columns) -> dict:
    return {"attempt": 0, "rank": 0, "step": step, "type": "anomaly", "severity": "critical", "rule": "nan", **columns}


def test_empty_store_has_no_runs_and_no_anomalies(connection):
    assert 0 == summaries.runs(connection).num_rows
    assert [] == summaries.anomalies(connection, "r", top=8)
    assert {} == summaries.summary(connection, "r").rows


def test_runs_are_listed_latest_first_with_their_newest_state(connection, put):
    put("runs", {"state": "running", "ordinal": 1, "started_at": START, "last_step": 3, "planned_steps": 9}, run="a")
    put("runs", {"state": "failed", "ordinal": 2, "started_at": START, "last_step": 5, "reason": "killed"}, run="a")
    put("runs", {"state": "running", "ordinal": 3, "started_at": START + dt.timedelta(hours=1)}, run="b")
    put("scalars", *(scalar("loss", 7, 1.0, rank=rank, attempt=1) for rank in range(3)), run="a")
    rows = summaries.runs(connection).to_pylist()

    assert [("b", "running"), ("a", "failed")] == [(row["run"], row["state"]) for row in rows]
    assert (3, 2, 5, "killed") == tuple(rows[1][name] for name in ("ranks", "attempts", "last_step", "reason"))
    assert START == rows[1]["started_at"]


def test_unregistered_run_is_listed_by_its_rows(connection, put, monkeypatch):
    monkeypatch.setattr("rankscope_storage.files.sorting.OWN_PART_ROWS", 2)
    tensor = {"kind": "k", "tensor": "t"}
    put("scalars", scalar("loss", 4, 1.0, ts=START), run="only scalars")
    put("tensor_stats", {"step": 5, **tensor}, run="only tensors, shared")
    put("tensor_stats", {"step": 6, **tensor}, {"step": 8, **tensor}, run="only tensors, own part")
    rows = {row["run"]: row for row in summaries.runs(connection).to_pylist()}
    expected = {"only scalars": 4, "only tensors, shared": 5, "only tensors, own part": 8}

    assert expected == {run: row["last_step"] for run, row in rows.items()}
    assert (None, START) == (rows["only scalars"]["state"], rows["only scalars"]["started_at"])


def test_seconds_of_a_run_end_at_its_end_or_last_row(connection, put):
    hour = dt.timedelta(hours=1)
    put("runs", {"state": "failed", "ordinal": 1, "started_at": START, "ended_at": START + hour}, run="ended")
    put("runs", {"state": "running", "ordinal": 2, "started_at": START}, run="goes on")
    put("scalars", scalar("loss", 1, 1.0, ts=START + 2 * hour), run="goes on")
    put("runs", {"state": "pending", "ordinal": 3}, run="nobody knows")
    found = {row["run"]: row["seconds"] for row in summaries.runs(connection).to_pylist()}

    assert {"ended": 3600.0, "goes on": 7200.0, "nobody knows": None} == found


def test_time_of_an_import_event_is_no_time_of_the_run(connection, put):
    """A trainer state contains no times. The start of its run is unknown, and it is not listed as the latest."""
    put("scalars", scalar("loss", 1, 2.0), run="imported")
    put("events", {"type": "import", "attempt": 0, "ts": START + dt.timedelta(days=1)}, run="imported")
    put("scalars", scalar("loss", 1, 2.0, ts=START), run="live")
    rows = summaries.runs(connection).to_pylist()

    expected = [("live", START, START), ("imported", None, None)]
    assert expected == [(row["run"], row["started_at"], row["last_seen_at"]) for row in rows]


def test_summary_counts_rows_ranks_attempts_and_steps(connection, put):
    put("runs", {"state": "completed", "planned_steps": 20, "ordinal": 1})
    put("scalars", *(scalar("loss", step, 1.0, rank=rank) for step in range(3, 6) for rank in range(2)))
    put("tensor_stats", {"attempt": 1, "rank": 2, "step": 9, "kind": "k", "tensor": "t"})
    put("scalars", scalar("lr", 99, 1.0), run="another")
    found = summaries.summary(connection, "r")

    other = summaries.summary(connection, "another")

    assert (None, None, None, None) == (other.loss_first, other.loss_last, other.loss_min, other.tokens_per_second)
    assert {"scalars": 6, "tensor_stats": 1, "runs": 1} == found.rows
    assert ("completed", 2, 3, 3, 9, 20) == (
        found.state, found.attempts, found.ranks, found.first_step, found.last_step, found.planned_steps,
    )  # fmt: skip


def test_loss_is_the_mean_over_ranks_and_its_minimum_is_finite(connection, put):
    losses = {1: (4.0, 6.0), 2: (1.0, 3.0), 3: (math.inf, 1.0), 4: (math.nan, 1.0)}
    for rank in range(2):
        put("scalars", *(scalar("loss", step, pair[rank], rank=rank) for step, pair in losses.items()))
    put("scalars", scalar("loss", 1, 0.001, labels='{"loss":"aux"}'), scalar("lr", 9, 0.0001))
    found = summaries.summary(connection, "r")

    assert (5.0, 2.0) == (found.loss_first, found.loss_min)
    assert math.isnan(found.loss_last)


def test_last_loss_is_from_the_last_attempt_also_if_steps_rewind(connection, put):
    put("scalars", *(scalar("loss", step, 9.0) for step in range(5)), scalar("loss", 2, 1.5, attempt=1))

    assert 1.5 == summaries.summary(connection, "r").loss_last


def test_tokens_per_second_sums_ranks_and_skips_the_restart_pause(connection, put):
    """Each process counts from 0: two ranks at 100/s for 10 s, an hour of pause, then one rank at 50/s."""
    for attempt, rate, late in ((0, 100, 0), (1, 50, 3600)):
        steps = [(step, START + dt.timedelta(seconds=late + step)) for step in range(11)]
        rows = [scalar("tokens_total", step, rate * step, ts=ts, attempt=attempt) for step, ts in steps]
        put("scalars", *(row | {"rank": rank} for row in rows for rank in range(2)))

    assert 150.0 == pytest.approx(summaries.summary(connection, "r").tokens_per_second)


def test_imported_token_rate_is_averaged_without_a_counter(connection, put):
    put("scalars", scalar("tokens_per_second", 1, 100.0), scalar("tokens_per_second", 2, 200.0))

    assert 150.0 == summaries.summary(connection, "r").tokens_per_second


def test_adjacent_anomalies_are_one_incident(connection, put):
    near = [anomaly(step, tensor=tensor) for step in (60, 61, 70) for tensor in ("a", "b")]
    put("events", *near, anomaly(120), {"type": "note", "step": 300}, anomaly(61, attempt=1))

    assert 3 == len(incidents(connection, ["r"])["r"])


def test_more_than_20_steps_between_anomalies_separate_incidents(connection, put):
    put("events", anomaly(60), anomaly(80), run="one")
    put("events", anomaly(60), anomaly(81), run="two")
    found = incidents(connection, ["one", "two"])

    assert (1, 2) == (len(found["one"]), len(found["two"]))


def test_lost_records_are_the_sum_of_the_gaps(connection, put):
    ranges = ({"first": 3, "last": 9}, {"first": 20, "last": 20})
    gaps = [{"type": "gap", "details": json.dumps(each)} for each in ranges]
    found = {"type": "gap", "details": json.dumps({"first": 4, "last": 5, "records": -2})}
    put("events", *gaps, found, {"type": "gap", "details": "not JSON"}, {"type": "gap"})

    assert 8 - 2 == summaries.summary(connection, "r").lost_records


def test_bytes_of_shared_files_are_divided_by_rows(connection, put, store, monkeypatch):
    monkeypatch.setattr("rankscope_storage.files.sorting.OWN_PART_ROWS", 50)
    counts = {"r": 60, "s": 30, "t": 10}
    put("scalars", *(scalar("loss", step, 1.0, run=run) for run, count in counts.items() for step in range(count)))
    sizes = {summaries.summary(connection, run).bytes_on_disk for run in "rst"}
    own = connection.files_table("scalars", run="r")["size_bytes"].to_pylist()[0]

    assert own in sizes
    assert 1 >= abs(sum(connection.files_table("scalars")["size_bytes"].to_pylist()) - sum(sizes))


def test_anomalies_are_ordered_first_cause_first(connection, put):
    told = [(60, "param_after", None), (60, "grad_reduced", None), (60, "grad_unreduced", None), (60, "act_out", 7)]
    told += [(60, "act_out", 3), (59, "param_after", None)]
    put("events", *(anomaly(step, kind=kind, call_id=call) for step, kind, call in told))
    put("events", anomaly(1, kind="act_out", attempt=1), {"type": "note", "step": 1})
    found = [(row.attempt, row.step, row.kind, row.call_id) for row in summaries.anomalies(connection, "r", top=8)]
    expected = [(0, *told[place]) for place in (5, 4, 3, 2, 1, 0)]

    assert [*expected, (1, 1, "act_out", None)] == found


def test_only_top_anomalies_are_returned_also_if_many_share_a_step(connection, put):
    put("events", *(anomaly(5, kind="act_out", call_id=call) for call in range(50, 0, -1)), anomaly(None), anomaly(6))
    found = summaries.anomalies(connection, "r", top=3)

    assert [1, 2, 3] == [row.call_id for row in found]
    assert [5, 6, None] == [row.step for row in summaries.anomalies(connection, "r", top=99)[-3:]]
    assert [6] == [row.step for row in summaries.anomalies(connection, "r", top=99, steps=(6, 9))]


def test_spike_of_the_loss_is_listed_before_the_gradients_of_its_step(connection, put):
    gradient = {"kind": "grad_unreduced", "tensor": "5.bias", "op": "norm", "value": 80.0, "rule": "AnomalyTurbulence"}
    put("events", anomaly(216, **gradient), anomaly(216, rule="LossSpike", op="loss", value=108.9))

    assert ["LossSpike", "AnomalyTurbulence"] == [line.rule for line in summaries.anomaly_lines(connection, "r")]


def test_anomalies_with_one_cause_are_one_line_with_all_ranks(connection, put):
    both = [anomaly(step, kind="grad_reduced", rank=rank) for step in (*range(10, 40), 61) for rank in (0, 1)]
    put("events", *both, anomaly(10, kind="grad_unreduced", rank=1), anomaly(12, kind="grad_reduced", rank=2))
    put("events", anomaly(None), anomaly(None), anomaly(11, kind="grad_reduced", attempt=1))
    lines = summaries.anomaly_lines(connection, "r")

    assert [
        *(("10", 0, "grad_unreduced", [1], 1), ("10-39", 0, "grad_reduced", [0, 1], 60)),
        *(("12", 0, "grad_reduced", [2], 1), ("61", 0, "grad_reduced", [0, 1], 2), (None, 0, None, [0], 2)),
        ("11", 1, "grad_reduced", [0], 1),
    ] == [(line.steps, line.attempt, line.kind, line.ranks, line.firings) for line in lines]


def test_run_name_can_contain_a_quote(connection, put):
    put("events", anomaly(1), run="x'; DROP VIEW events; --")

    assert 1 == len(summaries.anomalies(connection, "x'; DROP VIEW events; --", top=8))
    assert 1 == summaries.summary(connection, "x'; DROP VIEW events; --").rows["events"]


def test_summary_has_commit_and_command_of_the_newest_launch_with_them(connection, put):
    def config(commit: str | None, *argv: str) -> str:
        return json.dumps({"git_commit": commit, "argv": argv})

    put("runs", {"state": "failed", "ordinal": 1, "config": config("a" * 40, "train.py", "--lr", "3")})
    put("runs", {"state": "running", "ordinal": 2, "config": config("b" * 40, "train.py", "--key", "***")})
    put("runs", {"state": "running", "ordinal": 3}, {"state": "completed", "ordinal": 4, "config": "no JSON"})
    found = summaries.summary(connection, "r")

    assert ("b" * 40, "train.py --key ***") == (found.git_commit, found.command)
    assert (None, None) == (summaries.summary(connection, "s").git_commit, summaries.summary(connection, "s").command)
