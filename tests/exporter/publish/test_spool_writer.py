"""A rank with a spool: it serves overwritten records from disk, and the spools of dead processes."""

import errno
import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rankscope_contract.model.schema import PlanEntry
from rankscope_contract.wire.channel import Registration
from rankscope_contract.wire.spool import Orphan, SpoolReader, read_service, service_name
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.publish import registration, spool
from rankscope_exporter.publish.registration import OrphanRecovery
from rankscope_exporter.publish.ring import encode
from rankscope_exporter.publish.spool import Spool, needed_plans
from rankscope_exporter.records.record import StepRecord

ENTRY = PlanEntry(kind="param_after", tensor="w", shape=(2,))
OWN = "feedc0de"
LEASE = {"Rankscope_Lease": "lease-1"}


def leave_behind(root: Path, incarnation: str, records: Any = 1, service: str | None = None, **who: Any) -> None:
    """Create the spool of a process that published `records`, a list or their number, and was killed."""
    facts = {"run": "run-1", "rank": 0, "world_size": 2, "launch_id": "launch-0", "started_at": 7} | who
    spool = Spool(str(root), incarnation, max_bytes=1 << 30, service=service)
    spool.open(Registration(local_rank=0, host="node-0", pid=1, incarnation=incarnation, url="", **facts))
    for seq, record in enumerate([StepRecord(ts=1)] * records if isinstance(records, int) else records):
        spool.append(seq, encode(record))
    spool.close()


@pytest.fixture
def spooled(new_rank, tmp_path):
    """Return a function that creates a rank with its spool in `tmp_path`, which publishes this number of records."""

    def make(records: int = 0, **config: Any) -> Any:
        rank = new_rank(spool_dir=str(tmp_path), **config)
        rank.fill(records)
        return rank

    return make


@pytest.fixture
def heir(spooled, service, until, tmp_path):
    """Return a function that creates a rank which serves the spool `dead` and has registered it with the service."""

    def make(records: Any = 1) -> Any:
        if not (tmp_path / "dead").exists():
            leave_behind(tmp_path, "dead", records)
        rank = spooled(ingest_url=service.url)
        until(lambda: (orphan := rank.channel.orphans.get("dead")) is not None and orphan.lease)
        return rank

    return make


def test_rank_in_a_removed_folder_continues_without_a_spool(new_rank, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    rank = new_rank(spool_dir="rankscope-records")
    rank.fill(1)

    assert [0] == rank.records(-1).seqs
    assert "RANKSCOPE_SPOOL_DIR" in caplog.text


def test_overwritten_records_are_served_from_disk(spooled, record):
    """A service that was stopped for longer than the ring lasts gets all records."""
    rank = spooled(ring_records=256)
    for step in range(300):
        rank.channel.publish(record(step, [ENTRY], [{"norm": 1.0}]))
    seqs: list[int] = []
    while (got := rank.records(seqs[-1] if seqs else -1)).status == 200:
        assert "Rankscope-Lost" not in got.headers
        assert [int(got.headers[f"Rankscope-{name}"]) for name in ("First", "Last")] == [got.seqs[0], got.seqs[-1]]
        seqs += got.seqs

    assert list(range(300)) == seqs
    assert (0, 0) == (rank.dropped("ring_overrun"), rank.dropped("spool_full"))


def test_records_in_neither_ring_nor_spool_are_reported_as_lost(spooled):
    rank = spooled(300, ring_records=256, spool_bytes=60_000)
    got = rank.records(-1)

    assert ("0-43", 44) == (got.headers["Rankscope-Lost"], got.seqs[0])
    assert 44 == rank.dropped("ring_overrun")
    assert 0 < rank.dropped("spool_full") < 300


def test_forked_child_has_no_open_files_of_the_spool(heir, tmp_path):
    """The child may outlive its parent, whose lock must then be free; the parent is not affected."""
    rank = heir()
    rank.fill(1)
    child = os.fork()
    if child == 0:
        try:
            rank.channel.abandon_after_fork()
            rank.fill(1)
            open_files = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
            os._exit(sum(tmp_path in path.parents for path in open_files))
        finally:
            os._exit(99)
    code = os.waitpid(child, 0)[1]
    rank.fill(1)

    assert 0 == code
    assert rank.channel.orphans.get("dead") is not None
    assert [0, 1] == rank.records(-1).seqs
    assert Orphan.take(SpoolReader(tmp_path / OWN, pa, needed_plans)) is None


class _Disk:
    """A disk on which `write` blocks for spool files, from `hang()` to `answer()`. Other writes succeed."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root.resolve()
        self._answers = threading.Event()
        self._real = os.write
        self._answers.set()
        monkeypatch.setattr(os, "write", self._write)

    def hang(self) -> None:
        self._answers.clear()

    def answer(self) -> None:
        self._answers.set()

    def _write(self, descriptor: int, data: Any) -> int:
        if self._root in Path(f"/proc/self/fd/{descriptor}").resolve().parents:
            assert self._answers.wait(60)
        return self._real(descriptor, data)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Return the disk of `tmp_path`, with short timeouts of the publisher."""
    monkeypatch.setattr(spool, "WRITE_SECONDS", 0.2)
    monkeypatch.setattr(spool, "CLOSE_SECONDS", 0.2)
    made = _Disk(tmp_path, monkeypatch)
    yield made
    made.answer()


def on_disk(rank: Any, seqs: range) -> list[int]:
    return [seq for seq in seqs if rank.channel.spool.files.holds(seq)]


def test_record_is_on_disk_before_readers_get_it(spooled, tmp_path, monkeypatch):
    rank = spooled()
    append, early = rank.channel.ring.append, []

    def noting(one: Any) -> int:
        early.append(rank.channel.ring.head + 1 - SpoolReader(tmp_path / OWN, pa, needed_plans).head())
        return append(one)

    monkeypatch.setattr(rank.channel.ring, "append", noting)
    rank.fill(20)

    assert [0] * 20 == early


def test_hanging_disk_delays_only_one_record(spooled, disk, until, caplog):
    """The first record waits for the timeout, later records do not wait; the rank is still served."""
    rank = spooled(1)
    disk.hang()
    began = time.monotonic()
    rank.fill(29, begin=1)
    seconds = time.monotonic() - began

    assert 5.0 > seconds  # one timeout, not 29
    assert list(range(30)) == rank.records(-1).seqs
    assert [0] == on_disk(rank, range(30))
    assert [] == rank.faults  # a busy disk is no error inside the exporter
    slow = " is slow: a record was not written after 0.2 s; until it is, records are only in memory"
    assert 1 == caplog.text.count(slow)
    assert rank.channel.spool.folder is None  # not reported as the place of all records

    disk.answer()
    until(lambda: rank.channel.spool.folder)
    assert list(range(30)) == on_disk(rank, range(30))
    assert 0 == rank.dropped("spool_behind")


def test_spool_continues_when_the_disk_responds_again(spooled, tmp_path, disk, until, monkeypatch, caplog):
    """The backlog is written, further records are counted, and a new file starts after the gap."""
    monkeypatch.setattr(spool, "BACKLOG_RECORDS", 3)
    rank = spooled(1)
    disk.hang()
    rank.fill(8, begin=1)
    behind = rank.dropped("spool_behind")
    disk.answer()
    until(lambda: rank.channel.spool.folder)
    rank.fill(3, begin=9)
    rank.channel.close()

    assert 5 == behind
    assert [0, 1, 2, 3, 9, 10, 11] == on_disk(rank, range(12))
    files = sorted(path.name for path in (tmp_path / OWN).glob("*.arrows"))
    assert [f"{first:012d}.arrows" for first in (0, 9)] == files
    orphan = Orphan.take(SpoolReader(tmp_path / OWN, pa, needed_plans))
    parts = [orphan.after(cursor, 1 << 20) for cursor in (-1, 3)]
    assert [(0, 3), (9, 11)] == [(part.first, part.last) for part in parts]
    orphan.release()
    assert 1 == sum("responds again: 5 records were not spooled" in text for text in caplog.messages)
    assert [] == rank.faults


def test_removed_spool_folder_is_reported_in_one_line(spooled, tmp_path, caplog):
    rank = spooled(1)
    shutil.rmtree(tmp_path)
    rank.fill(5, begin=1)
    assert list(range(6)) == rank.records(-1).seqs
    rank.channel.close()
    boundary = ErrorBoundary()
    for where, error in rank.faults:
        boundary.report(where, error)

    (found,) = (entry for entry in caplog.records if entry.levelno == logging.ERROR)
    text = f"records cannot be written to {tmp_path}/{OWN}: the folder was removed; a service still"
    assert text in found.getMessage()
    assert not found.exc_info
    assert 0 == boundary.count


def test_hanging_delete_does_not_block_commits(spooled, service, until, monkeypatch):
    """Commits are noted during a poll and during a heartbeat; neither may block."""
    rank = spooled(8, ingest_url=service.url, spool_bytes=60_000)
    until(lambda: rank.channel.lease)
    answers, real = threading.Event(), os.unlink

    def unlink(path: Any, *arguments: Any, **named: Any) -> None:
        assert ".arrows" not in str(path) or answers.wait(60)
        real(path, *arguments, **named)

    monkeypatch.setattr(os, "unlink", unlink)
    got = rank.records(6, committed=6, **LEASE)
    seqs = rank.fill(1)
    answers.set()

    assert ([7], [8]) == (got.seqs, seqs)


def test_hanging_disk_blocks_neither_attach_nor_close(spooled, tmp_path, disk):
    rank = spooled()

    assert [] == list(tmp_path.iterdir())  # no disk operation yet
    disk.hang()
    rank.fill(1)
    began = time.monotonic()
    rank.channel.close()

    assert 30.0 > time.monotonic() - began  # the disk never responds
    # The lock is released when the process exits.
    assert Orphan.take(SpoolReader(tmp_path / OWN, pa, needed_plans)) is None


@pytest.mark.parametrize("cause", ["folder", "thread"])
def test_records_enter_the_ring_if_the_spool_cannot_be_used(new_rank, tmp_path, plant, monkeypatch, cause):
    """Python starts no thread while the interpreter exits."""
    (tmp_path / "taken").write_text("a file stands where the folder should be")
    rank = new_rank(spool_dir=str(tmp_path / ("taken" if cause == "folder" else "spool")))
    if cause == "thread":
        plant(threading.Thread, "start", RuntimeError("can't create new thread at interpreter shutdown"))
    seqs = rank.fill(3)
    monkeypatch.undo()

    assert [0, 1, 2] == seqs == rank.records(-1).seqs
    assert ["spool"] == [where for where, _ in rank.faults]
    assert 3 == rank.dropped("spool_error")


def test_record_refused_by_the_ring_is_not_spooled(spooled, record, tmp_path):
    rank = spooled()
    good = record(0, [ENTRY], [{"norm": 1.0}])
    bad = type(good.statistics)(good.statistics.plan, good.statistics.values[:1], good.statistics.counts)
    with pytest.raises(ValueError, match="plan of 1 entries needs 6 and 4"):
        rank.channel.publish(StepRecord(ts=1, step=0, statistics=bad))
    seq = rank.channel.publish(good)
    rank.channel.close()

    assert 0 == seq
    assert [f"{0:012d}.arrows"] == [path.name for path in (tmp_path / OWN).glob("*.arrows")]
    assert [] == rank.faults


def test_spool_has_the_registration_and_is_deleted_when_all_is_committed(spooled, service, until, tmp_path):
    rank = spooled(3, ingest_url=service.url, settings={"every": 5})
    until(lambda: rank.channel.lease)
    known = json.loads((tmp_path / OWN / "identity.json").read_text())["registration"]
    ours = {"run": "run-1", "launch_id": "launch-1", "rank": 0, "world_size": 2, "host": "node-1", "incarnation": OWN}

    assert {**ours, "pid": os.getpid(), "planned_steps": 100, "config": {"every": 5}}.items() <= known.items()
    assert known["started_at"] > 0
    rank.records(2, committed=2, **LEASE)
    rank.channel.close()
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("url", "name"),
    [
        *(("http://Node-1:9470", "http://node-1:9470"), ("HTTP://node-1:9470/", "http://node-1:9470")),
        *(("https://node-1", "https://node-1:443"), ("http://node-1/rankscope/", "http://node-1:80/rankscope")),
        ("http://user:secret@node-1:9470?token=secret#x", "http://node-1:9470"),
        ("http://[::1]:9470", "http://[::1]:9470"),
    ],
)
def test_service_name_is_normalized_and_contains_no_secret(url, name):
    assert name == service_name(url)


def test_rank_serves_spools_of_its_own_service_or_of_none(spooled, service, until, tmp_path):
    """Otherwise the store of another service would get these runs, and the right store would miss them."""
    leave_behind(tmp_path, "other", service="http://127.0.0.1:9", started_at=1)
    leave_behind(tmp_path, "same", service=service_name(service.url), started_at=2)
    leave_behind(tmp_path, "unnamed", started_at=3)
    leave_behind(tmp_path, "old", started_at=4)
    identity = json.loads((tmp_path / "old" / "identity.json").read_text())
    del identity["service"]  # the format of earlier releases
    (tmp_path / "old" / "identity.json").write_text(json.dumps(identity))
    rank = spooled(ingest_url=service.url + "/")
    until(lambda: OWN in {sent["incarnation"] for sent in service.registrations})
    rank.fill(1)

    assert {"same", "unnamed", "old", OWN} == {sent["incarnation"] for sent in service.registrations}
    assert (tmp_path / "other" / f"{0:012d}.arrows").exists()
    assert rank.channel.orphans.get("other") is None
    assert service_name(service.url) == read_service(tmp_path / OWN)


def test_orphaned_spools_register_before_the_rank(spooled, service, until, record, tmp_path):
    records = [record(step, [ENTRY], [{"norm": 1.0}]) for step in range(4)]
    leave_behind(tmp_path, "dead-b", records[:2], started_at=9)
    leave_behind(tmp_path, "dead-a", records, started_at=8)
    rank = spooled(ingest_url=service.url)
    until(lambda: len(service.registrations) >= 3)
    first, second, third = service.registrations[:3]
    got = rank.get("/records?incarnation=dead-a&after=0")
    plan = rank.get(f"/plan/{records[0].statistics.plan.hash}")

    assert ["dead-a", "dead-b", OWN] == [sent["incarnation"] for sent in (first, second, third)]
    wanted = {"launch_id": "launch-0", "state": "draining", "head": 3, "served_by": OWN, "url": rank.channel.url}
    assert wanted.items() <= first.items()
    assert third["served_by"] is None
    assert [1, 2, 3] == got.seqs
    shown = [got.headers[f"Rankscope-{name}"] for name in ("Incarnation", "State", "Head")]
    assert ["dead-a", "draining", "3"] == shown
    assert records[0].statistics.plan.json == plan.text


def test_orphaned_spool_is_deleted_after_the_last_commit(heir, tmp_path):
    rank = heir(4)
    path = "/records?incarnation=dead"
    unleased = rank.get(f"{path}&after=3&committed=3")
    waiting = rank.get(f"{path}&after=3&committed=1", **LEASE)

    assert (204, 204) == (unleased.status, waiting.status)
    assert (tmp_path / "dead").exists()
    drained = rank.get(f"{path}&after=3&committed=3", **LEASE)
    assert (503, "draining") == (drained.status, drained.headers["Rankscope-State"])
    assert not (tmp_path / "dead").exists()
    assert 409 == rank.get(f"{path}&after=3").status


def test_orphaned_spool_is_deleted_by_the_committed_reply(spooled, service, until, tmp_path, monkeypatch):
    monkeypatch.setattr(registration, "FINISH_SECONDS", 0.0)
    leave_behind(tmp_path, "dead", 4)
    service.committed = 3
    spooled(ingest_url=service.url)

    until(lambda: not (tmp_path / "dead").exists())


def test_reader_gets_503_for_a_spool_that_a_reply_committed(heir, service, until, monkeypatch):
    """Otherwise the reader would treat this rank as another process, and the dead process as just lost."""
    monkeypatch.setattr(registration, "HEARTBEAT_SECONDS", 0.01)
    service.committed = 3
    rank = heir(4)
    until(lambda: sum(sent["incarnation"] == "dead" for sent in service.registrations) >= 2)

    assert 503 == rank.get("/records?incarnation=dead&after=3&committed=3", **LEASE).status


@pytest.fixture
def two_at_once(monkeypatch):
    """Let each rank serve two spools at a time, with short intervals."""
    monkeypatch.setattr(registration, "AT_ONCE", 2)
    monkeypatch.setattr(registration, "HEARTBEAT_SECONDS", 0.01)


def test_rank_serves_a_few_orphans_at_a_time_oldest_first(two_at_once, spooled, service, until, tmp_path):
    """There may be thousands after many crashes, and each one needs an open file in the training process."""
    for number in (3, 1, 2):
        leave_behind(tmp_path, f"dead-{number}")
    served = spooled(ingest_url=service.url).channel.orphans
    until(lambda: len(service.registrations) >= 6)

    assert {"dead-3", "dead-1", OWN} == {sent["incarnation"] for sent in service.registrations}
    served.finished(served.get("dead-3"))
    until(lambda: "dead-2" in {sent["incarnation"] for sent in service.registrations})


def test_refused_orphans_do_not_block_others(two_at_once, spooled, service, until, tmp_path):
    for number in range(5):
        leave_behind(tmp_path, f"dead-{number}")
    service.refused = ("dead-0", "dead-1")
    spooled(ingest_url=service.url)

    until(lambda: {"dead-2", "dead-3"} <= {sent["incarnation"] for sent in service.registrations})


def test_ranks_that_start_together_share_the_orphans(spooled, service, until, tmp_path):
    """The file lock ensures that only one rank serves each spool."""
    names = [f"dead-{number}" for number in range(6)]
    for name in names:
        leave_behind(tmp_path, name)
    ranks = [spooled(ingest_url=service.url, incarnation=incarnation) for incarnation in (OWN, "another")]
    until(lambda: {OWN, "another", *names} == {sent["incarnation"] for sent in service.registrations})

    assert [1] * 6 == [sum(rank.channel.orphans.get(name) is not None for rank in ranks) for name in names]


def test_undrained_orphan_is_served_by_the_next_rank(heir):
    heir(4).channel.close()

    assert [0, 1, 2, 3] == heir().get("/records?incarnation=dead&after=-1").seqs


def test_incarnation_cannot_leave_the_spool_folder(heir):
    rank = heir()
    for name in ("../dead", "dead/..", "..", "%2e%2e", ".", ""):
        assert 409 == rank.get(f"/records?incarnation={name}&after=-1").status
        assert 404 == rank.get(f"/plan/{name or 'x'}/../identity").status


SPOILED = {
    "torn": lambda identity: identity.write_text('{"format": 1, "registr'),
    "missing": lambda identity: identity.unlink(),
    "future": lambda identity: identity.write_text('{"format": 2, "registration": {"schema_version": 1}}'),
    "foreign": lambda identity: identity.write_text(identity.read_text().replace('"rank": 0', '"rank": "zero"')),
    "renamed": lambda identity: identity.parent.rename(identity.parent.with_name("copied")),
}


def test_unreadable_spool_folders_are_unchanged_and_logged_once(heir, tmp_path, caplog, monkeypatch):
    for name, spoil in SPOILED.items():
        leave_behind(tmp_path, name)
        spoil(tmp_path / name / "identity.json")
    leave_behind(tmp_path, "of another user")
    (tmp_path / "no spool").mkdir()
    (tmp_path / "no spool.txt").write_text("no spool")
    before = sorted(path.name for path in tmp_path.glob("*/*"))
    real = Path.open

    def refuse(path: Path, *arguments: Any, **named: Any) -> Any:
        if "of another user" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", refuse)
    rank = heir()
    skipped = [text for text in caplog.messages if "spool skipped" in text]

    assert [] == [name for name in SPOILED if rank.channel.orphans.get(name) is not None]
    assert before == sorted(path.name for path in tmp_path.glob("*/*") if path.parent.name not in (OWN, "dead"))
    for name in ("torn", "missing", "future", "foreign", "copied", "of another user"):
        assert 1 == sum(f"{tmp_path}/{name}" in text for text in skipped), name
    assert 1 == sum("Permission denied" in text for text in skipped)
    assert (6, []) == (len(skipped), rank.faults)


def test_disk_error_of_an_orphaned_spool_is_answered_with_500(heir, plant):
    rank = heir()
    plant(SpoolReader, "after", OSError(errno.EIO, "Input/output error"))
    got = rank.get("/records?incarnation=dead&after=-1")

    assert 500 == got.status
    assert "Input/output error" in got.text


@pytest.mark.parametrize(
    ("part", "method", "other"), [(OrphanRecovery, "stop", OWN), (spool.SpoolWriter, "close", "dead")]
)
def test_error_while_closing_leaves_no_other_spool_open(part, method, other, heir, tmp_path, plant, monkeypatch):
    plant(part, method, OSError("the disk is gone"))
    rank = heir()
    rank.fill(1)
    with pytest.raises(OSError, match="the disk is gone"):
        rank.channel.close()
    monkeypatch.undo()
    free = Orphan.take(SpoolReader(tmp_path / other, pa, needed_plans))

    assert free is not None
    free.release()


def test_folder_that_does_not_exist_yet_is_no_warning(new_rank, service, until, caplog, tmp_path):
    """Without a record, no process has created the folder."""
    new_rank(ingest_url=service.url, spool_dir=str(tmp_path / "absent"))
    until(lambda: service.registrations)

    assert [] == [text for text in caplog.messages if "spool folder" in text]
