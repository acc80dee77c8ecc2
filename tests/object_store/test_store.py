"""A store in a bucket has the content of a local store after the same operations, and reports errors of S3."""

import datetime as dt
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest
from tests.object_store.proxy import Fault
from tests.storage.conftest import make_batch
from tests.storage.crashes.operations import rows

from rankscope.sizing.costs import Costs
from rankscope_storage.api.store import Store, is_store
from rankscope_storage.base.errors import FilesGoneError, ShardLockError, ShardLostError, StoreError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.location import Location, located
from rankscope_storage.connection import connect
from rankscope_storage.log.delta import CHECKPOINT_COMMITS, Log
from rankscope_storage.maintenance import compaction, vacuum
from rankscope_storage.maintenance.check import check
from rankscope_storage.maintenance.compaction import compact
from rankscope_storage.maintenance.copying import copy_store
from rankscope_storage.maintenance.repair import repair
from rankscope_storage.maintenance.retention import Retention, retain
from rankscope_storage.maintenance.stats import store_stats
from rankscope_storage.runs.edit import merge, remove, rename

ODD = "a=b/c:d %25 ü"
FEBRUARY = dt.datetime(2026, 2, 1, tzinfo=dt.UTC)
QUERIES = (
    "SELECT run, name, step, value, rank FROM scalars ORDER BY ALL",
    "SELECT * EXCLUDE (ordinal) FROM tensor_latest ORDER BY ALL",
    "SELECT run, tensor, step, rows FROM tensor_rollups ORDER BY ALL",
    f"SELECT count(*) FROM scalar_curve('{ODD}', 'loss')",
)


@pytest.fixture
def location(bucket: str) -> Location:
    return located(f"s3://{bucket}/team/history")


@pytest.fixture(autouse=True)
def constants(monkeypatch):
    monkeypatch.setattr(compaction, "SMALL_FILES", 1)
    monkeypatch.setattr(vacuum, "REMOVED_FILES_HOURS", 0)


def answers(root: Location) -> list[list[dict[str, Any]]]:
    with connect(root, locked=True) as connection:
        return [connection.query(query).to_pylist() for query in QUERIES]


def life(root: Location, age: Callable[[], None]) -> list[Any]:
    """Return the answers and results after each of the operations of a store."""
    found: list[Any] = [is_store(root)]
    with Store.open(root, create=True).claim(owner="a") as writer:
        for seq in range(0, 24, 2):  # a checkpoint becomes due
            writer.append(rows(seq, 2))
        writer.append(make_batch(range(4), run=ODD, incarnation="odd"))
    with Store.open(root).claim(owner="b") as writer:
        found += [writer.watermark("i0"), writer.append(rows(20, 8)).rows, answers(root)]
    report = compact(root, sync_to_disk)
    found += [report.files_removed, report.files_added, answers(root)]
    with connect(root) as before:
        removed = retain(root, Retention(raw_days=1, scalars_days=1), sync_to_disk, now=FEBRUARY)
        found += [removed.rows, answers(root), before.query(QUERIES[0]).num_rows]
    with Store.open(root).claim("1/2", owner="c") as writer:
        writer.append(rows(0, 3, run="new", process="n"))
        writer.append(rows(0, 3, run="other", process="o"))
    age()
    found += [rename(root, "new", "renamed", sync_to_disk).rows, merge(root, "other", "renamed", sync_to_disk).rows]
    found += [remove(root, "r", sync_to_disk).rows > 0, answers(root)]
    found += [vacuum.maintain(root, sync_to_disk).data_files, check(root, deep=True).is_intact, answers(root)]
    found += [repair(root, sync_to_disk).changed, store_stats(Log.open(root, sync_to_disk), by="dataset").unused_bytes]
    with Store.open(root).claim(owner="d") as writer:  # watermarks survive the clean-up of the log
        return [*found, writer.watermark("i0"), writer.append(rows(26, 3)).rows, answers(root)]


def test_store_in_a_bucket_has_the_life_of_a_local_one(location, tmp_path: Path, s3_proxy, monkeypatch):
    from tests.storage.crashes.operations import age

    monkeypatch.setattr("rankscope_storage.log.shard_lock.SILENT_SECONDS", 0.0)
    local = tmp_path / "store"

    assert life(local, lambda: age(local)) == life(location, lambda: setattr(s3_proxy, "aged", True))


def test_watermarks_of_a_thousand_ranks_take_one_request_each(location, s3_proxy):
    """After a restart, the service asks for those of all ranks, in the thread that also stores their rows."""
    store = Store.open(location, create=True)
    with store.claim(owner="a") as writer:
        for seq in range(12):  # with a checkpoint
            writer.append(make_batch([seq], incarnation=f"i{seq}"))
    with store.claim(owner="b") as writer:
        s3_proxy.arm()
        found = [writer.watermark(f"i{number}") for number in range(20)]

    assert [*range(12), *[-1] * 8] == found
    assert 20 == s3_proxy.requests.count("HEAD entry")
    assert len(s3_proxy.requests) <= 20 + 3 + CHECKPOINT_COMMITS


def test_older_owner_is_refused_and_a_silent_one_is_not_waited_for(location, monkeypatch):
    monkeypatch.setattr("rankscope_storage.log.shard_lock.SILENT_SECONDS", 600.0)  # the test may take more than 30 s
    store = Store.open(location, create=True)
    with store.claim(owner="older") as older, store.claim(owner="newer") as newer:
        newer.append(make_batch(range(3)))
        with pytest.raises(ShardLostError, match="taken over by newer"):
            older.append(make_batch(range(3)))
    with pytest.raises(ShardLockError, match="s ago by newer"):
        repair(location, sync_to_disk)


def test_requests_of_a_flush_are_bounded(location, s3_proxy):
    """A flush of k files has k + 9 requests; a checkpoint, every ten commits, has at most 120 more."""
    with Store.open(location, create=True).claim(owner="a") as writer:
        writer.append(make_batch(range(1)))
        s3_proxy.arm()
        for seq in range(1, 21):
            writer.append(make_batch(range(seq, seq + 1)))

    assert s3_proxy.counts.total() <= 20 * (1 + 9) + 2 * 120, s3_proxy.counts
    costs = Costs()
    assert s3_proxy.counts.total() == pytest.approx(20 * (1 + costs.commit_writes + costs.commit_reads), rel=0.15)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("NoSuchBucket", "the bucket does not exist"),
        ("ExpiredToken", "the credentials have expired"),
        ("InvalidAccessKeyId", "does not accept the credentials"),
        ("AccessDenied", "lack a permission: allow s3:ListBucket"),
        ("RequestTimeTooSkewed", "set the clock"),
        ("unconditional", "ignores If-None-Match"),
    ],
)
def test_error_of_the_server_is_one_sentence_and_creates_nothing(location, kind, words, s3_proxy, s3_server):
    s3_proxy.arm(Fault(kind=kind, count=1000))
    with pytest.raises(StoreError, match=words) as refused:
        Store.open(location, create=True)

    assert s3_server.secret_key not in str(refused.value)
    assert "\n" not in str(refused.value)
    s3_proxy.arm()
    assert not is_store(location)


def test_missing_credentials_are_named(location, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match="there are no credentials"):
        Store.open(location, create=True)


def test_query_of_a_bucket_reports_refusals_and_deleted_files(location, bucket, s3_proxy, s3_server):
    Store.open(location, create=True).claim(owner="a").append(make_batch(range(3)))
    with connect(location) as connection, connection.snapshot() as pinned:
        s3_proxy.arm(Fault(kind="ExpiredToken", request="GET data", count=1000))
        with pytest.raises(StoreError, match=r"^cannot access s3://.*the credentials have expired"):
            connection.query(QUERIES[0])
        s3_proxy.arm()
        for key in s3_server.objects(bucket):
            if "dataset=scalars" in key:
                s3_server.delete(bucket, key)
        with pytest.raises(duckdb.IOException, match="does not exist"):
            connection.query(QUERIES[0])
        with pytest.raises(FilesGoneError):
            pinned.query(QUERIES[0])


def test_copy_to_a_bucket_and_back_keeps_rows_and_watermarks(location, tmp_path, s3_proxy):
    local, back = tmp_path / "store", tmp_path / "back"
    with Store.open(local, create=True).claim(owner="a") as writer:
        for seq in range(0, 24, 2):
            writer.append(rows(seq, 2))
        writer.append(make_batch(range(4), run=ODD, incarnation="odd"))
    s3_proxy.arm(Fault(kind="AccessDenied", request="PUT data", nth=5, count=1000))
    with pytest.raises(StoreError, match="Run the copy again"):
        copy_store(local, location, sync_to_disk)
    s3_proxy.arm()

    assert not is_store(location)

    there = copy_store(local, location, sync_to_disk)
    copy_store(location, back, sync_to_disk)

    assert (4, 25) == (there.resumed, there.files)
    assert answers(local) == answers(location) == answers(back)
    assert check(location, deep=True).is_intact
    assert [] == list((back / "_staging").iterdir())
    with pytest.raises(StoreError, match="is a store already"):
        copy_store(local, location, sync_to_disk)
    for root in (location, back):
        with Store.open(root).claim(owner="b") as writer:
            assert (23, {"scalars": 2, "tensor_stats": 4}) == (writer.watermark("i0"), writer.append(rows(20, 5)).rows)


def test_credentials_of_a_profile_are_renewed_before_they_expire(location, tmp_path, monkeypatch):
    """A program prints credentials that expire within ten minutes, so that each use renews them."""
    asked, until = tmp_path / "asked", dt.datetime.now(dt.UTC) + dt.timedelta(minutes=9)
    key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    keys = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": secret}
    (tmp_path / "keys.json").write_text(json.dumps({**keys, "Expiration": until.isoformat()}))
    (tmp_path / "config").write_text(
        f"[default]\ncredential_process = sh -c 'echo asked >> {asked}; cat {tmp_path}/keys.json'\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setattr("rankscope_storage.files.bucket._RENEWED_AFTER", dt.timedelta(0))
    with Store.open(location, create=True).claim(owner="a") as writer:
        before = asked.read_text().count("asked")
        writer.append(make_batch(range(3)))

    assert before < asked.read_text().count("asked")
    assert 3 == len(answers(location)[0])
