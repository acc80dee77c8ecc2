"""A rank with a spool: it serves overwritten records from disk, and the spools of dead processes."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rankscope_contract.model.schema import PlanEntry
from rankscope_contract.protocol.channel import Registration, RegistrationReply
from rankscope_contract.spool import Orphan, SpoolReader
from rankscope_contract.spool.reader import read_service, service_name
from rankscope_exporter.base.errors import ConfigError, ErrorBoundary
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.serving import orphan_recovery, persistence
from rankscope_exporter.serving.config import ServeConfig
from rankscope_exporter.serving.spool import FAILED, Spool, needed_plans

ENTRY = PlanEntry(kind="param_after", tensor="w", shape=(2,))
OWN = "feedc0de"
LEASE = {"Rankscope_Lease": "lease-1"}


def leave_behind(root: Path, incarnation: str, records: list[Any], service: str | None = None, **who: Any) -> Spool:
    """Create the spool of a process that published `records` and was killed."""
    facts = {"run": "run-1", "rank": 0, "world_size": 2, "launch_id": "launch-0", "started_at": 7} | who
    spool = Spool(str(root), incarnation, max_bytes=1 << 30, service=service)
    spool.open(Registration(local_rank=0, host="node-0", pid=1, incarnation=incarnation, url="", **facts))
    for seq, record in enumerate(records):
        spool.append(seq, record)
    spool.close()
    return spool


def metric(page: str, reason: str) -> float:
    (line,) = [line for line in page.splitlines() if line.startswith("rankscope_dropped_total") and reason in line]
    return float(line.rpartition(" ")[2])


def test_rank_in_a_removed_folder_continues_without_a_spool(new_rank, record, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    rank = new_rank(spool_dir="rankscope-records")
    rank.channel.publish(record(0, [ENTRY], [{"norm": 1.0}]))

    assert [0] == rank.records(-1).seqs
    assert "RANKSCOPE_SPOOL_DIR" in caplog.text


def test_overwritten_records_are_served_from_disk(new_rank, record, tmp_path):
    """A service that was stopped for longer than the ring lasts gets all records."""
    rank = new_rank(ring_records=256, spool_dir=str(tmp_path))
    for step in range(300):
        rank.channel.publish(record(step, [ENTRY], [{"norm": 1.0}]))
    seqs: list[int] = []
    while (got := rank.records(seqs[-1] if seqs else -1)).status == 200:
        assert "Rankscope-Lost" not in got.headers
        assert [int(got.headers[f"Rankscope-{name}"]) for name in ("First", "Last")] == [got.seqs[0], got.seqs[-1]]
        seqs += got.seqs

    assert list(range(300)) == seqs
    assert 0 == metric(rank.get("/metrics").text, "ring_overrun")
    assert 0 == metric(rank.get("/metrics").text, "spool_full")


def test_records_in_neither_ring_nor_spool_are_reported_as_lost(new_rank, record, tmp_path):
    rank = new_rank(ring_records=256, spool_dir=str(tmp_path), spool_bytes=60_000)
    for step in range(300):
        rank.channel.publish(record(step))
    got = rank.records(-1)
    page = rank.get("/metrics").text

    assert "0-43" == got.headers["Rankscope-Lost"]
    assert 44 == got.seqs[0]
    assert 44 == metric(page, "ring_overrun")
    assert 0 < metric(page, "spool_full") < 300


def test_unusable_spool_folder_leaves_the_ring_working(new_rank, record, tmp_path):
    (tmp_path / "taken").write_text("a file stands where the folder should be")
    rank = new_rank(spool_dir=str(tmp_path / "taken"))
    seqs = [rank.channel.publish(record(step)) for step in range(3)]

    assert [0, 1, 2] == seqs == rank.records(-1).seqs
    assert ["spool"] == [where for where, _ in rank.faults]
    assert 3 == metric(rank.get("/metrics").text, "spool_error")


def test_forked_child_has_no_open_files_of_the_spool(new_rank, service, until, record, tmp_path):
    """The child may outlive its parent, whose lock must then be free; the parent is not affected."""
    leave_behind(tmp_path, "dead", [record(0)])
    rank = new_rank(ingest_url=service.url, spool_dir=str(tmp_path))
    rank.channel.publish(record(0))
    until(lambda: rank.channel.persistence.orphan("dead") is not None)
    child = os.fork()
    if child == 0:
        try:
            rank.channel.abandon_after_fork()
            rank.channel.publish(record(1))
            open_files = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
            os._exit(sum(tmp_path in path.parents for path in open_files))
        finally:
            os._exit(99)
    code = os.waitpid(child, 0)[1]
    rank.channel.publish(record(1))

    assert 0 == code
    assert rank.channel.persistence.orphan("dead") is not None
    assert [0, 1] == rank.records(-1).seqs
    assert Orphan.take(tmp_path / OWN, needed_plans) is None


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
    monkeypatch.setattr(persistence, "WRITE_SECONDS", 0.2)
    monkeypatch.setattr(persistence, "CLOSE_SECONDS", 0.2)
    made = _Disk(tmp_path, monkeypatch)
    yield made
    made.answer()


def on_disk(rank: Any, seqs: range) -> list[int]:
    return [seq for seq in seqs if rank.channel.persistence.holds(seq)]


def test_record_is_on_disk_before_readers_get_it(new_rank, record, tmp_path, monkeypatch):
    rank = new_rank(spool_dir=str(tmp_path))
    append, early = rank.channel.ring.append, []

    def noting(one: Any) -> int:
        early.append(rank.channel.ring.head + 1 - SpoolReader(tmp_path / OWN, needed_plans).head())
        return append(one)

    monkeypatch.setattr(rank.channel.ring, "append", noting)
    for step in range(20):
        rank.channel.publish(record(step))

    assert [0] * 20 == early


def test_hanging_disk_delays_only_one_record(new_rank, record, tmp_path, disk, caplog):
    """The first record waits for the timeout, later records do not wait; the rank is still served."""
    rank = new_rank(spool_dir=str(tmp_path))
    rank.channel.publish(record(0))
    disk.hang()
    began = time.monotonic()
    for step in range(1, 30):
        rank.channel.publish(record(step))
    seconds = time.monotonic() - began
    got = rank.records(-1)

    assert 5.0 > seconds  # one timeout, not 29
    assert list(range(30)) == got.seqs
    assert [0] == on_disk(rank, range(30))
    assert [] == rank.faults  # a busy disk is no error inside the exporter
    assert 1 == caplog.text.count(
        " is slow: a record was not written after 0.2 s; until it is, records are only in memory"
    )
    assert rank.channel.persistence.folder is None  # not reported as the place of all records


def test_spool_continues_when_the_disk_responds_again(new_rank, record, tmp_path, disk, until, monkeypatch, caplog):
    """The backlog is written, further records are counted, and a new file starts after the gap."""
    monkeypatch.setattr(persistence, "BACKLOG_RECORDS", 3)
    rank = new_rank(spool_dir=str(tmp_path))
    rank.channel.publish(record(0))
    disk.hang()
    for step in range(1, 9):
        rank.channel.publish(record(step))
    behind = metric(rank.get("/metrics").text, "spool_behind")
    disk.answer()
    until(lambda: rank.channel.persistence.folder)
    for step in range(9, 12):
        rank.channel.publish(record(step))
    rank.channel.close()

    assert 5 == behind
    assert [0, 1, 2, 3, 9, 10, 11] == on_disk(rank, range(12))
    assert [f"{first:012d}.arrows" for first in (0, 9)] == sorted(
        path.name for path in (tmp_path / OWN).glob("*.arrows")
    )
    orphan = Orphan.take(tmp_path / OWN, needed_plans)
    assert (0, 3) == (orphan.after(-1, 1 << 20).first, orphan.after(-1, 1 << 20).last)
    assert (9, 11) == (orphan.after(3, 1 << 20).first, orphan.after(3, 1 << 20).last)
    orphan.release()
    assert 1 == sum("responds again: 5 records were not spooled" in text for text in caplog.messages)
    assert [] == rank.faults


def test_removed_spool_folder_is_reported_in_one_line(new_rank, record, tmp_path, caplog):
    rank = new_rank(spool_dir=str(tmp_path))
    boundary = ErrorBoundary()
    rank.channel.publish(record(0))
    shutil.rmtree(tmp_path)
    for step in range(1, 6):
        rank.channel.publish(record(step))
    assert list(range(6)) == rank.records(-1).seqs
    rank.channel.close()
    for where, error in rank.faults:
        boundary.report(where, error)

    (found,) = (entry for entry in caplog.records if entry.levelno == logging.ERROR)
    assert (
        f"records cannot be written to {tmp_path}/{OWN}: the folder was removed; a service still" in found.getMessage()
    )
    assert not found.exc_info
    assert 0 == boundary.count


def test_short_disk_hang_loses_no_record(new_rank, record, tmp_path, disk, until):
    rank = new_rank(spool_dir=str(tmp_path))
    disk.hang()
    for step in range(20):
        rank.channel.publish(record(step))
    disk.answer()
    until(lambda: rank.channel.persistence.folder)
    rank.channel.close()

    assert list(range(20)) == on_disk(rank, range(20))
    assert 0 == rank.channel.persistence.dropped["spool_behind"]


def test_hanging_delete_does_not_block_commits(new_rank, service, until, record, tmp_path, monkeypatch):
    """Commits are noted during a poll and during a heartbeat; neither may block."""
    rank = new_rank(ingest_url=service.url, spool_dir=str(tmp_path), spool_bytes=60_000)
    for step in range(8):
        rank.channel.publish(record(step))
    until(lambda: rank.channel.state.lease)
    answers, real = threading.Event(), os.unlink

    def unlink(path: Any, *arguments: Any, **named: Any) -> None:
        assert ".arrows" not in str(path) or answers.wait(60)
        real(path, *arguments, **named)

    monkeypatch.setattr(os, "unlink", unlink)
    got = rank.records(6, committed=6, **LEASE)
    seq = rank.channel.publish(record(8))
    answers.set()

    assert [7] == got.seqs
    assert 8 == seq


def test_hanging_disk_blocks_neither_attach_nor_close(new_rank, record, tmp_path, disk):
    rank = new_rank(spool_dir=str(tmp_path))

    assert [] == list(tmp_path.iterdir())  # no disk operation yet
    disk.hang()
    rank.channel.publish(record(0))
    began = time.monotonic()
    rank.channel.close()

    assert 30.0 > time.monotonic() - began  # the disk never responds
    assert Orphan.take(tmp_path / OWN, needed_plans) is None  # the lock is released when the process exits


def test_records_enter_the_ring_if_no_spool_thread_can_start(new_rank, record, tmp_path, monkeypatch):
    """Python starts no thread while the interpreter exits."""
    rank = new_rank(spool_dir=str(tmp_path))

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        seqs = [rank.channel.publish(record(step)) for step in range(2)]

    assert [0, 1] == seqs == rank.records(-1).seqs
    assert 2 == metric(rank.get("/metrics").text, "spool_error")


def test_record_refused_by_the_ring_is_not_spooled(new_rank, record, statistics, tmp_path):
    rank = new_rank(spool_dir=str(tmp_path))
    good = record(0, [ENTRY], [{"norm": 1.0}])
    bad = type(good.statistics)(good.statistics.plan, good.statistics.values[:1], good.statistics.counts)
    with pytest.raises(ValueError, match="needs"):
        rank.channel.publish(type(good)(ts=1, step=0, statistics=bad))
    seq = rank.channel.publish(good)
    rank.channel.close()

    assert 0 == seq
    assert [f"{0:012d}.arrows"] == [path.name for path in (tmp_path / OWN).glob("*.arrows")]
    assert [] == rank.faults


class _Switching(dict[str, int]):
    """Switches to another thread between the read and the write of an addition."""

    def __getitem__(self, key: str) -> int:
        found = super().__getitem__(key)
        time.sleep(0)
        return found


def test_failed_records_are_counted_exactly_by_several_threads(record, tmp_path):
    """The spool thread cannot open its folder, while other threads publish records after the end of the writer."""
    spool = Spool(str(tmp_path), OWN, max_bytes=1 << 20)
    spool.dropped = _Switching(spool.dropped)
    writer = persistence.SpoolWriter(spool, lambda: None, on_fault=lambda *_: None, meter=CpuMeter())
    writer.close()
    one, rounds, threads = record(0, [ENTRY], [{"norm": 1.0}]), 500, 8
    begin = threading.Barrier(threads)

    def run(work: Any, *more: int) -> None:
        begin.wait()
        for seq in range(rounds):
            work(seq, one, *more)

    started = [threading.Thread(target=run, args=(writer.write, 1)) for _ in range(threads - 1)]
    started.append(threading.Thread(target=run, args=(spool.append,)))
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()

    assert threads * rounds == spool.dropped[FAILED]


def test_spool_folder_is_deleted_when_all_is_committed(new_rank, service, until, record, tmp_path):
    rank = new_rank(ingest_url=service.url, spool_dir=str(tmp_path))
    for step in range(3):
        rank.channel.publish(record(step))
    until(lambda: rank.channel.state.lease)
    rank.records(2, committed=2, **LEASE)
    rank.channel.close()

    assert [] == list(tmp_path.iterdir())


def test_identity_file_contains_the_registration(new_rank, record, tmp_path):
    rank = new_rank(spool_dir=str(tmp_path), settings={"every": 5})
    rank.channel.publish(record(0))
    known = json.loads((tmp_path / OWN / "identity.json").read_text())["registration"]

    assert ("run-1", "launch-1", 0, 2, OWN) == tuple(
        known[name] for name in ("run", "launch_id", "rank", "world_size", "incarnation")
    )
    assert ("node-1", os.getpid(), 100, {"every": 5}) == tuple(
        known[name] for name in ("host", "pid", "planned_steps", "config")
    )
    assert known["started_at"] > 0


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://Node-1:9470", "http://node-1:9470"),
        ("HTTP://node-1:9470/", "http://node-1:9470"),
        ("https://node-1", "https://node-1:443"),
        ("http://node-1/rankscope/", "http://node-1:80/rankscope"),
        ("http://user:secret@node-1:9470?token=secret#x", "http://node-1:9470"),
        ("http://[::1]:9470", "http://[::1]:9470"),
    ],
)
def test_service_name_is_normalized_and_contains_no_secret(url, name):
    assert name == service_name(url)


def test_rank_serves_spools_of_its_own_service_or_of_none(new_rank, service, until, record, tmp_path):
    """Otherwise the store of another service would get these runs, and the right store would miss them."""
    leave_behind(tmp_path, "other", [record(0)], service="http://127.0.0.1:9", started_at=1)
    leave_behind(tmp_path, "same", [record(0)], service=service_name(service.url), started_at=2)
    leave_behind(tmp_path, "unnamed", [record(0)], started_at=3)
    leave_behind(tmp_path, "old", [record(0)], started_at=4)
    identity = json.loads((tmp_path / "old" / "identity.json").read_text())
    del identity["service"]  # the format of earlier releases
    (tmp_path / "old" / "identity.json").write_text(json.dumps(identity))
    rank = new_rank(ingest_url=service.url + "/", spool_dir=str(tmp_path))
    until(lambda: OWN in {sent["incarnation"] for sent in service.registrations})
    rank.channel.publish(record(0))

    assert {"same", "unnamed", "old", OWN} == {sent["incarnation"] for sent in service.registrations}
    assert (tmp_path / "other" / f"{0:012d}.arrows").exists()
    assert rank.channel.persistence.orphan("other") is None
    assert service_name(service.url) == read_service(tmp_path / OWN)


def test_orphaned_spools_register_before_the_rank(new_rank, service, until, record, tmp_path):
    records = [record(step, [ENTRY], [{"norm": 1.0}]) for step in range(4)]
    leave_behind(tmp_path, "dead-b", records[:2], started_at=9)
    leave_behind(tmp_path, "dead-a", records, started_at=8)
    rank = new_rank(ingest_url=service.url, spool_dir=str(tmp_path))
    until(lambda: len(service.registrations) >= 3)
    first, second, third = service.registrations[:3]
    got = rank.get("/records?incarnation=dead-a&after=0")
    plan = rank.get(f"/plan/{records[0].statistics.plan.hash}")

    assert ["dead-a", "dead-b", OWN] == [sent["incarnation"] for sent in (first, second, third)]
    assert ("launch-0", "draining", 3, OWN) == tuple(
        first[name] for name in ("launch_id", "state", "head", "served_by")
    )
    assert rank.channel.url == first["url"]
    assert third["served_by"] is None
    assert [1, 2, 3] == got.seqs
    assert ("dead-a", "draining", "3") == tuple(
        got.headers[f"Rankscope-{name}"] for name in ("Incarnation", "State", "Head")
    )
    assert records[0].statistics.plan.json == plan.text


def test_orphaned_spool_is_deleted_after_the_last_commit(new_rank, service, until, record, tmp_path):
    leave_behind(tmp_path, "dead", [record(step) for step in range(4)])
    rank = new_rank(ingest_url=service.url, spool_dir=str(tmp_path))
    until(lambda: service.registrations)
    until(lambda: rank.channel.persistence.orphan("dead").lease)
    path = "/records?incarnation=dead"
    unleased = rank.get(f"{path}&after=3&committed=3")
    waiting = rank.get(f"{path}&after=3&committed=1", **LEASE)

    assert (204, 204) == (unleased.status, waiting.status)
    assert (tmp_path / "dead").exists()
    drained = rank.get(f"{path}&after=3&committed=3", **LEASE)
    assert (503, "draining") == (drained.status, drained.headers["Rankscope-State"])
    assert not (tmp_path / "dead").exists()
    assert 409 == rank.get(f"{path}&after=3").status


def test_orphaned_spool_is_deleted_by_the_committed_reply(new_rank, service, until, record, tmp_path, monkeypatch):
    monkeypatch.setattr(orphan_recovery, "FINISH_SECONDS", 0.0)
    leave_behind(tmp_path, "dead", [record(step) for step in range(4)])
    service.committed = 3
    new_rank(ingest_url=service.url, spool_dir=str(tmp_path))

    until(lambda: not (tmp_path / "dead").exists())


def test_reader_gets_503_for_a_spool_that_a_reply_committed(new_rank, service, until, record, tmp_path):
    """Otherwise the reader would treat this rank as another process, and the dead process as just lost."""
    leave_behind(tmp_path, "dead", [record(step) for step in range(4)])
    service.committed = 3
    rank = new_rank(ingest_url=service.url, spool_dir=str(tmp_path))
    until(lambda: sum(sent["incarnation"] == "dead" for sent in service.registrations) >= 2)

    assert 503 == rank.get("/records?incarnation=dead&after=3&committed=3", **LEASE).status


class _Service:
    """A service double that stores registered incarnations and refuses some."""

    def __init__(self, refused: tuple[str, ...] = ()) -> None:
        self.received: list[str] = []
        self.refused = refused

    def register(self, registration: Registration) -> RegistrationReply:
        if registration.incarnation in self.refused:
            raise orphan_recovery.RefusedError(409, "not you")
        self.received.append(registration.incarnation)
        return RegistrationReply(lease="l", attempt=0, heartbeat_seconds=1.0, committed=-1)

    def poke(self, incarnation: str) -> None:
        """Ignore the request."""


@pytest.fixture
def orphans_of(tmp_path, monkeypatch):
    """Return a function that starts the recovery of the spools in `tmp_path`, two at a time."""
    monkeypatch.setattr(orphan_recovery, "AT_ONCE", 2)
    monkeypatch.setattr(orphan_recovery, "HEARTBEAT_SECONDS", 0.01)
    begun: list[orphan_recovery.OrphanRecovery] = []

    def begin(service: _Service) -> orphan_recovery.OrphanRecovery:
        begun.append(
            orphan_recovery.OrphanRecovery(
                str(tmp_path), OWN, service, lambda: "http://127.0.0.1:1", on_fault=pytest.fail
            )
        )
        begun[0].start()
        return begun[0]

    yield begin
    for orphans in begun:
        orphans.stop()


def test_rank_serves_a_few_orphans_at_a_time_oldest_first(orphans_of, until, record, tmp_path):
    """There may be thousands after many crashes, and each one needs an open file in the training process."""
    for number in (3, 1, 2):
        leave_behind(tmp_path, f"dead-{number}", [record(0)])
    service = _Service()
    orphans = orphans_of(service)
    until(lambda: len(service.received) >= 6)

    assert {"dead-3", "dead-1"} == set(service.received)
    orphans.finished(orphans.get("dead-3"))
    until(lambda: "dead-2" in service.received)


def test_refused_orphans_do_not_block_others(orphans_of, until, record, tmp_path):
    for number in range(5):
        leave_behind(tmp_path, f"dead-{number}", [record(0)])
    service = _Service(refused=("dead-0", "dead-1"))
    orphans_of(service)

    until(lambda: {"dead-2", "dead-3"} <= set(service.received))


def test_ranks_that_start_together_share_the_orphans(new_rank, service, until, record, tmp_path):
    """The file lock ensures that only one rank serves each spool."""
    for number in range(6):
        leave_behind(tmp_path, f"dead-{number}", [record(0)])
    rank = new_rank(ingest_url=service.url, spool_dir=str(tmp_path))
    other = orphan_recovery.OrphanRecovery(
        str(tmp_path), "another", _Deaf(), lambda: "http://127.0.0.1:1", on_fault=lambda where, error: None
    )
    other.start()
    other.wait_searched(5.0)
    until(lambda: len(service.registrations) >= 1)
    owners = [
        sum(recovery.get(f"dead-{number}") is not None for recovery in (rank.channel.persistence._orphans, other))
        for number in range(6)
    ]
    other.stop()

    assert [1] * 6 == owners


class _Deaf:
    def register(self, registration: Registration) -> Any:
        raise orphan_recovery.UnreachableError("nobody")

    def poke(self, incarnation: str) -> None:
        """Ignore the request."""


def test_undrained_orphan_is_served_by_the_next_rank(new_rank, service, until, record, tmp_path):
    leave_behind(tmp_path, "dead", [record(step) for step in range(4)])
    rank = new_rank(ingest_url=service.url, spool_dir=str(tmp_path))
    until(lambda: service.registrations)
    rank.channel.close()
    again = new_rank(ingest_url=service.url, spool_dir=str(tmp_path))

    until(lambda: again.channel.persistence.orphan("dead") is not None)
    assert [0, 1, 2, 3] == again.get("/records?incarnation=dead&after=-1").seqs


@pytest.mark.parametrize("name", ["../dead", "dead/..", "..", "%2e%2e", ".", ""])
def test_incarnation_cannot_leave_the_spool_folder(new_rank, service, until, record, tmp_path, name):
    leave_behind(tmp_path / "spool", "dead", [record(0)])
    rank = new_rank(ingest_url=service.url, spool_dir=str(tmp_path / "spool"))
    until(lambda: service.registrations)

    assert 409 == rank.get(f"/records?incarnation={name}&after=-1").status
    assert 404 == rank.get(f"/plan/{name or 'x'}/../identity").status


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "identity.json").write_text('{"format": 1, "registr'),
        lambda folder: (folder / "identity.json").unlink(),
        lambda folder: (folder / "identity.json").write_text('{"format": 2, "registration": {"schema_version": 1}}'),
        lambda folder: (folder / "identity.json").write_text(
            (folder / "identity.json").read_text().replace('"rank": 0', '"rank": "zero"')
        ),
        lambda folder: folder.rename(folder.with_name("copied")),
    ],
    ids=["torn", "missing", "future", "foreign", "renamed"],
)
def test_unreadable_spool_folder_is_unchanged_and_logged_once(
    new_rank, service, until, record, tmp_path, caplog, spoil
):
    leave_behind(tmp_path, "dead", [record(0)])
    leave_behind(tmp_path, "good", [record(0)])
    spoil(tmp_path / "dead")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign.txt").write_text("no spool")
    before = sorted(path.name for path in tmp_path.glob("*/*"))
    rank = new_rank(ingest_url=service.url, spool_dir=str(tmp_path))
    until(lambda: rank.channel.persistence.orphan("good") is not None)
    until(lambda: "spool skipped" in caplog.text)  # the order of the two is not defined

    assert rank.channel.persistence.orphan("dead") is None
    assert before == sorted(path.name for path in tmp_path.glob("*/*") if OWN not in str(path))
    assert 1 == sum("spool skipped" in message for message in caplog.messages)
    assert [] == rank.faults


def test_spool_of_another_user_is_logged_and_unchanged(new_rank, service, until, record, tmp_path, caplog, monkeypatch):
    leave_behind(tmp_path, "theirs", [record(0)])
    leave_behind(tmp_path, "ours", [record(0)])
    real = os.open

    def refuse(path: Any, *arguments: Any, **named: Any) -> int:
        if "theirs" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "open", refuse)
    rank = new_rank(ingest_url=service.url, spool_dir=str(tmp_path))
    until(lambda: rank.channel.persistence.orphan("ours") is not None)

    assert rank.channel.persistence.orphan("theirs") is None
    assert "Permission denied" in caplog.text
    assert [] == rank.faults


def test_disk_error_of_an_orphaned_spool_is_answered_with_500(new_rank, service, until, record, tmp_path, monkeypatch):
    leave_behind(tmp_path, "dead", [record(0)])
    rank = new_rank(ingest_url=service.url, spool_dir=str(tmp_path))
    until(lambda: rank.channel.persistence.orphan("dead") is not None)

    def fail(_self: Any, _cursor: int, _max_bytes: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(SpoolReader, "after", fail)
    got = rank.get("/records?incarnation=dead&after=-1")

    assert 500 == got.status
    assert "Input/output error" in got.text


def test_spool_settings_are_checked():
    found = MonitorConfig().with_environment({"RANKSCOPE_SPOOL_DIR": "~/spool", "RANKSCOPE_SPOOL_SYNC": "1"}).serve

    assert (str(Path("~/spool").expanduser()), True) == (found.spool_dir, found.spool_sync)
    assert "rankscope-records" == ServeConfig().spool_dir
    assert ServeConfig(spool_dir="off").spool_dir is ServeConfig(spool_dir=None).spool_dir is None
    assert MonitorConfig().with_environment({"RANKSCOPE_SPOOL_DIR": "off"}).serve.spool_dir is None
    with pytest.raises(ConfigError, match="spool_bytes must be a whole number of at least 1, not 0"):
        ServeConfig(spool_bytes=0)
    with pytest.raises(ConfigError, match="spool_dir must be text"):
        ServeConfig(spool_dir=5)


@pytest.mark.parametrize("part", ["_orphans", "_writer"])
def test_error_while_closing_leaves_nothing_open(part, new_rank, service, tmp_path, monkeypatch):
    rank = new_rank(ingest_url=service.url, spool_dir=str(tmp_path))
    closed: list[str] = []

    def closing(name: str, original: Any) -> Any:
        def call(*args: Any) -> None:
            closed.append(name)
            original(*args)
            if name == part:
                raise OSError("the disk is gone")

        return call

    for name, method in (("_orphans", "stop"), ("_writer", "close")):
        owner = getattr(rank.channel.persistence, name)
        monkeypatch.setattr(owner, method, closing(name, getattr(owner, method)))
    with pytest.raises(OSError, match="the disk is gone"):
        rank.channel.close()

    assert ["_orphans", "_writer"] == closed


def test_folder_that_does_not_exist_yet_is_no_warning(new_rank, service, until, caplog, tmp_path):
    """Without a record, no process has created the folder."""
    rank = new_rank(ingest_url=service.url, spool_dir=str(tmp_path / "absent"))
    until(lambda: service.registrations)
    rank.channel.close()

    assert [] == [record.message for record in caplog.records if "spool folder" in record.message]
