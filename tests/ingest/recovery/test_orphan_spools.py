"""Spools of dead processes: the service stores them once, in their own run and attempt, with the right state."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.programs import run_command

from rankscope_contract.model.events import Event
from rankscope_contract.model.schema import Plan, PlanEntry
from rankscope_contract.protocol.channel import NOTHING, Registration
from rankscope_contract.spool import FolderLock
from rankscope_exporter.records.step_record import NamedPlan, Scalar, Statistics, StepRecord
from rankscope_exporter.serving.spool import Spool
from rankscope_ingest.recovery import orphan_spools
from rankscope_ingest.recovery import orphan_spools as spools_module
from rankscope_ingest.recovery.orphan_spools import Spools

PLAN = NamedPlan.of(Plan((PlanEntry(kind="param_after", tensor="w"),)))
SEQS = "SELECT incarnation, attempt, seq FROM scalars WHERE name = 'loss' ORDER BY ALL"
EXIT = Event(type="exit", details='{"reason": "completed", "last_step": 9}')


def record(step: int, *events: Event) -> StepRecord:
    import pyarrow as pa

    numbers = Statistics(PLAN, pa.array([1.0] * 6, pa.float32()), pa.array([0, 0, 0, 1], pa.int64()))
    return StepRecord(ts=1_000_000 + step, step=step, statistics=numbers, scalars=(Scalar("loss", 1.0),), events=events)


def make_spool(
    root: Path, incarnation: str, steps: int, *events: Event, first: int = 0, service: str | None = None, **who: Any
) -> Spool:
    """Create the spool of a process that was killed after `steps` records, with `events` in the last one."""
    facts = {"run": "r", "rank": 0, "world_size": 1, "launch_id": "launch", "started_at": 7} | who
    spool = Spool(str(root), incarnation, max_bytes=1 << 30, service=service)
    spool.open(Registration(local_rank=0, host="here", pid=1, incarnation=incarnation, url="", **facts))
    for seq in range(first, steps):
        spool.append(seq, record(seq, *(events if seq == steps - 1 else ())))
    spool.close()
    return spool


def settings(root: Path) -> dict[str, Any]:
    return {"spool.folders": [str(root)], "spool.scan_seconds": 0.1}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "spool"


async def test_spool_is_stored_and_deleted_at_the_start(start_service, eventually, root):
    make_spool(root, "dead", 10, EXIT)
    async with start_service(**settings(root)) as service:
        await eventually(lambda: not any(root.iterdir()))
        state = await eventually(lambda: _state(service, "completed"))
        (target,) = await service.targets()
        sd = await service.get("/sd")
    rows = service.rows(SEQS)
    tensors = service.rows("SELECT seq FROM tensor_stats ORDER BY seq")

    assert [("dead", 0, seq) for seq in range(10)] == [tuple(row.values()) for row in rows]
    assert list(range(10)) == [row["seq"] for row in tensors]
    assert 0 == state["records_lost"]
    assert ("service", 9) == (target["served_by"], target["committed"])
    assert "[]" == sd[1]


async def test_service_reads_spools_in_its_folders_that_name_another_service(start_service, eventually, root):
    """The configuration names the folder. A service that was moved to another host has another address."""
    make_spool(root, "dead", 3, EXIT, service="http://earlier:9470")
    async with start_service(**settings(root)) as service:
        await eventually(lambda: not any(root.iterdir()))

    assert [0, 1, 2] == [row["seq"] for row in service.rows(SEQS)]


async def _state(service: Any, wanted: str) -> Any:
    state = await service.run_state()
    return state if state["state"] == wanted else None


async def test_stored_records_of_a_spool_are_not_stored_again(start_service, eventually, root):
    """A service that was killed between commit and deletion leaves such a spool."""
    make_spool(root, "dead", 6)
    async with start_service(**settings(root)) as service:
        await eventually(lambda: not any(root.iterdir()))
    make_spool(root, "dead", 10, EXIT)
    async with start_service(**settings(root)) as service:
        await eventually(lambda: not any(root.iterdir()))
    make_spool(root, "dead", 10, EXIT)
    async with start_service(**settings(root)) as service:
        await eventually(lambda: not any(root.iterdir()))
    rows = service.rows(SEQS)

    assert [("dead", 0, seq) for seq in range(10)] == [tuple(row.values()) for row in rows]


async def test_spool_of_a_live_process_is_not_read(start_service, eventually, root):
    make_spool(root, "dead", 3)
    spool = make_spool(root, "alive", 3)
    lock = FolderLock.take(root / "alive")
    assert lock is not None
    async with start_service(**settings(root)) as service:
        await eventually(lambda: [path.name for path in root.iterdir()] == ["alive"])
        await eventually(lambda: _enough(service))
        assert (spool.folder / f"{0:012d}.arrows").exists()
        lock.release()
        await eventually(lambda: not any(root.iterdir()))
    assert {"dead", "alive"} == {row["incarnation"] for row in service.rows(SEQS)}


async def _enough(service: Any) -> bool:
    return len(service.snapshots) >= 1


async def test_spool_of_a_known_rank_is_read_from_its_cursor(start_service, fake_rank, eventually, root):
    """The service did not poll the last records. They are in the spool, so that none is counted as lost."""
    async with start_service(**settings(root)) as service, fake_rank() as rank:
        rank.publish_steps(4)
        await rank.register(service.url)
        await eventually(lambda: rank.committed == 3)
        rank.publish_steps(3)
        rank.behave = _silent
        await rank.register(service.url)  # it reports 7 records and dies
        await rank.die()
        make_spool(root, rank.registration.incarnation, 7)
        await eventually(lambda: not any(root.iterdir()))
        state = await eventually(lambda: _state(service, "failed"))
        (target,) = await service.targets()
    seqs = [row["seq"] for row in service.rows(SEQS)]
    gaps = service.rows("SELECT sum(value) AS lost FROM events WHERE type = 'gap'")

    assert list(range(7)) == seqs
    assert (0, 0) == (state["records_lost"], target["records_lost"])
    assert (gaps[0]["lost"] or 0.0) == 0.0
    assert "stopped responding" in state["reason"]


async def test_last_step_of_a_failed_run_is_that_of_its_spool(start_service, fake_rank, eventually, root):
    """The service finds the spool after it has stored the state of the failed run."""
    async with start_service(**settings(root)) as service, fake_rank(planned_steps=100) as rank:
        rank.publish_steps(4)
        await rank.register(service.url)
        await eventually(lambda: rank.committed == 3)
        await rank.die()
        await eventually(lambda: _state(service, "failed"))
        make_spool(root, rank.registration.incarnation, 7, planned_steps=100)
        await eventually(lambda: not any(root.iterdir()))
        await eventually(lambda: service.rows("SELECT 1 FROM attempts WHERE state = 'failed' AND last_step > 3"))
    printed = [run_command(*one, "--store", service.store).stdout for one in (("runs",), ("summary", "r"))]

    assert ["6/100", "6/100"] == ["6/100" if "6/100" in one.replace(" / ", "/") else one for one in printed]


async def _silent(_request: Any) -> Any:
    import asyncio

    await asyncio.sleep(60)


async def test_records_missing_in_the_spool_are_counted(start_service, fake_rank, eventually, root):
    async with start_service(**settings(root)) as service, fake_rank() as rank:
        rank.publish_steps(4)
        await rank.register(service.url)
        await eventually(lambda: rank.committed == 3)
        rank.publish_steps(6)
        rank.behave = _silent
        await rank.register(service.url)  # 10 records are reported, but only 8 are in the spool
        await rank.die()
        make_spool(root, rank.registration.incarnation, 8, first=6)
        await eventually(lambda: not any(root.iterdir()))
        state = await eventually(lambda: _state(service, "failed"))
    gaps = service.rows("SELECT details FROM events WHERE type = 'gap' ORDER BY ordinal")

    assert [0, 1, 2, 3, 6, 7] == [row["seq"] for row in service.rows(SEQS)]
    assert 4 == state["records_lost"] == sum(json.loads(row["details"])["records"] for row in gaps)


async def test_lost_records_of_an_earlier_service_are_undone_by_the_spool(start_service, fake_rank, eventually, root):
    async with start_service() as service, fake_rank() as rank:
        rank.publish_steps(4)
        await rank.register(service.url)
        await eventually(lambda: rank.committed == 3)
        rank.publish_steps(6)
        rank.behave = _silent
        await rank.register(service.url)
        await rank.die()
        lost = await eventually(lambda: _state(service, "failed"))
    make_spool(root, rank.registration.incarnation, 10, EXIT)
    async with start_service(**settings(root)) as service:
        await eventually(lambda: not any(root.iterdir()))
        found = await eventually(lambda: _state(service, "completed"))
    gaps = service.rows("SELECT details FROM events WHERE type = 'gap' ORDER BY ordinal")

    assert (6, 0) == (lost["records_lost"], found["records_lost"])
    assert 0 == sum(json.loads(row["details"])["records"] for row in gaps)
    assert list(range(10)) == [row["seq"] for row in service.rows(SEQS)]


async def test_dead_process_keeps_the_attempt_of_its_launch(start_service, fake_rank, eventually, root):
    """The next launch has the same launch id: processes without a process group derive equal ids."""
    async with start_service() as service, fake_rank() as rank:
        rank.publish_steps(2)
        await rank.register(service.url)
        await eventually(lambda: rank.committed == 1)
        await rank.die()
        await eventually(lambda: _state(service, "failed"))
        async with fake_rank(incarnation="second") as second:
            second.publish_steps(3)
            await second.register(service.url)
            await eventually(lambda: second.committed == 2)
            second.state = "draining"
            await eventually(lambda: _state(service, "stopped"))
    make_spool(root, rank.registration.incarnation, 5, EXIT)
    async with start_service(**settings(root)) as service:
        await eventually(lambda: not any(root.iterdir()))
    rows = service.rows("SELECT incarnation, attempt, count(*) AS n FROM scalars GROUP BY ALL ORDER BY ALL")

    assert [("inc-r-0", 0, 5), ("second", 1, 3)] == [tuple(row.values()) for row in rows]


async def test_spool_of_a_static_target_keeps_its_configured_identity(start_service, fake_rank, eventually, root):
    async with fake_rank() as rank:
        rank.publish_steps(2)
        static = {"url": rank.registration.url, "run": "named-here", "rank": 3, "world_size": 4}
        async with start_service(**settings(root), targets=[static]) as service:
            await eventually(lambda: _cursors(service, [1]))
            await rank.die()
            make_spool(root, rank.registration.incarnation, 5, EXIT)
            await eventually(lambda: not any(root.iterdir()))
    rows = service.rows("SELECT run, rank, seq FROM scalars ORDER BY seq")

    assert [("named-here", 3, seq) for seq in range(5)] == [tuple(row.values()) for row in rows]


async def _cursors(service: Any, wanted: list[int]) -> bool:
    return [target["cursor"] for target in await service.targets()] == wanted


async def test_live_rank_with_the_identity_of_a_spool_is_not_affected(start_service, fake_rank, eventually, root):
    """An elastic restart without a process group has the same run, launch and rank while the old spool is drained."""
    async with start_service(**settings(root)) as service, fake_rank(incarnation="new") as rank:
        rank.publish_steps(2)
        assert 200 == (await rank.register(service.url))[0]
        await eventually(lambda: rank.committed == 1)
        make_spool(root, "old", 5, EXIT)
        await eventually(lambda: not any(root.iterdir()))
        rank.publish_steps(2)
        await eventually(lambda: rank.committed == 3)
        assert 200 == (await rank.register(service.url))[0]
        state = await eventually(lambda: _state(service, "running"))  # updated once a second

    assert "running" == state["state"]
    assert {"old": 5, "new": 4} == {
        row["incarnation"]: row["n"]
        for row in service.rows("SELECT incarnation, count(*) AS n FROM scalars GROUP BY ALL")
    }


@pytest.mark.thorough
async def test_another_rank_serves_the_spool_of_a_silent_process(start_service, fake_rank, eventually):
    """The registration is rejected while the process is alive. The target is never in http_sd."""
    async with start_service() as service, fake_rank() as rank:
        rank.publish_steps(2)
        await rank.register(service.url)
        await eventually(lambda: rank.committed == 1)
        rank.registration = dataclasses.replace(rank.registration, served_by="successor")
        early = await rank.register(service.url)
        await rank.die()
        await eventually(lambda: _gone(service))
        async with fake_rank(incarnation=rank.registration.incarnation, served_by="successor") as successor:
            successor.records, successor.head, successor.state = rank.records, 1, "draining"
            successor.publish(scalars=[{"name": "loss", "value": 1.0}], events=[_exit()])
            late = await successor.register(service.url)
            discovered = await service.get("/sd")
            await eventually(lambda: successor.committed == 2)
            state = await eventually(lambda: _state(service, "completed"))

    assert (409, 200) == (early[0], late[0])
    assert "is still alive" in early[1]
    assert "[]" == discovered[1]
    assert 0 == state["records_lost"]
    assert [0, 1, 2] == [row["seq"] for row in service.rows(SEQS)]


def _exit() -> dict[str, Any]:
    return {"type": "exit", "severity": "info", "message": "done", "details": '{"reason": "completed"}'}


async def _gone(service: Any) -> bool:
    return [target["health"] for target in await service.targets()] == ["gone"]


SPOILED = {
    "torn": (
        lambda folder: (folder / "identity.json").write_text("{"),
        "is incomplete or no spool file (JSONDecodeError",
    ),
    "missing": (lambda folder: (folder / "identity.json").unlink(), "cannot be read"),
    "future": (
        lambda folder: (folder / "identity.json").write_text('{"format": 9, "registration": {"schema_version": 1}}'),
        "format 9",
    ),
    "impossible": (lambda folder: _change(folder, '"rank": 0', '"rank": 7'), "does not fit world_size"),
    "foreign": (lambda folder: _change(folder, '"world_size": 1', '"world_size": null'), "world_size is None"),
    "copied": (lambda folder: _change(folder, '"copied"', '"original"'), "was renamed or copied"),
}


async def test_unreadable_folder_is_reported_and_not_changed(start_service, eventually, root, caplog):
    for name, (spoil, _) in SPOILED.items():
        spoil(make_spool(root, name, 3).folder)
    make_spool(root, "whole", 3)
    (root / "empty").mkdir()
    (root / "foreign.txt").write_text("no spool")
    async with start_service(**settings(root)) as service:
        await eventually(lambda: not (root / "whole").exists())
        await eventually(lambda: all(text in caplog.text for _, text in SPOILED.values()))
        await eventually(lambda: _enough(service))

    assert {*SPOILED, "empty", "foreign.txt"} == {path.name for path in root.iterdir()}
    assert all((root / name / f"{0:012d}.arrows").exists() for name in SPOILED)
    assert {"whole"} == {row["incarnation"] for row in service.rows(SEQS)}
    for _, text in SPOILED.values():
        assert 1 == sum(text in message for message in caplog.messages)


def _change(folder: Path, old: str, new: str) -> None:
    path = folder / "identity.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


async def test_spool_that_cannot_be_deleted_is_reported_and_stored_once(
    start_service, eventually, root, caplog, monkeypatch
):
    make_spool(root, "dead", 3)
    real = os.unlink

    def refuse(path: Any, *arguments: Any, **named: Any) -> None:
        if str(root) in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        real(path, *arguments, **named)

    monkeypatch.setattr(os, "unlink", refuse)
    for _ in range(2):
        async with start_service(**settings(root)):
            await eventually(lambda: "is stored in full but its folder cannot be removed" in caplog.text)
            caplog.clear()
    async with start_service() as service:
        pass

    assert [0, 1, 2] == [row["seq"] for row in service.rows(SEQS)]


async def test_older_launches_found_at_the_start_get_lower_attempt_numbers(start_service, fake_rank, eventually, root):
    make_spool(root, "b", 2, launch_id="second", started_at=9)
    make_spool(root, "a", 2, launch_id="first", started_at=5)
    async with start_service(**settings(root)) as service, fake_rank(launch_id="third", started_at=12) as rank:
        await rank.register(service.url)
        await eventually(lambda: not any(root.iterdir()))

    assert {("a", 0), ("b", 1)} == {(row["incarnation"], row["attempt"]) for row in service.rows(SEQS)}
    assert 2 == rank.attempt


@pytest.mark.thorough
async def test_older_launch_found_late_is_not_the_state_of_the_run(start_service, fake_rank, eventually, root):
    """Its records arrive while a later launch trains. The state of the later launch is that of the run."""
    async with start_service(**settings(root)) as service, fake_rank(launch_id="new", started_at=12) as rank:
        rank.publish_steps(3)
        await rank.register(service.url)
        await eventually(lambda: _state(service, "running"))
        make_spool(root, "old", 2, launch_id="old", started_at=5)
        await eventually(lambda: not any(root.iterdir()))
        rank.publish_steps(1)
        await eventually(lambda: rank.committed == 3)
        state = await service.run_state()
    attempts = service.rows("SELECT launch_id, state FROM attempts ORDER BY ALL")

    assert "running" == state["state"]
    assert {"launch_id": "old", "state": "failed"} in attempts


async def test_spool_that_waits_for_a_commit_is_not_counted_as_lost(start_service, eventually, root):
    """The store commits nothing for longer than the timeout of a rank."""
    make_spool(root, "dead", 40, EXIT)
    limits = {"runs.failed_after_seconds": 0.4, "ingest.max_pending_rows": 10, "ingest.flush_rows": 10}
    slow = {"ingest.flush_after_seconds": 3.0, "ingest.max_bytes": 65_536, "ingest.poll_seconds": 0.2}
    async with start_service(**settings(root) | limits | slow) as service:
        await eventually(lambda: not any(root.iterdir()))
        state = await eventually(lambda: _state(service, "completed"))
    gaps = service.rows("SELECT * FROM events WHERE type = 'gap'")

    assert ([], 0) == (gaps, state["records_lost"])
    assert 40 == len(service.rows(SEQS))


async def test_torn_end_of_a_spool_loses_only_the_torn_record(start_service, eventually, root):
    spool = make_spool(root, "dead", 5)
    (file,) = spool.folder.glob("*.arrows")
    file.write_bytes(file.read_bytes()[:-100])
    async with start_service(**settings(root)) as service:
        await eventually(lambda: not any(root.iterdir()))

    assert [0, 1, 2, 3] == [row["seq"] for row in service.rows(SEQS)]


async def test_damaged_record_in_the_middle_is_counted_as_lost(start_service, eventually, root):
    spool = Spool(str(root), "dead", max_bytes=8 * 12_000)
    leave = Registration(
        run="r", rank=0, world_size=1, local_rank=0, host="h", pid=1, incarnation="dead", launch_id="l", url=""
    )
    spool.open(leave)
    for seq in range(6):
        spool.append(seq, record(seq))
    spool.close()
    first, *_ = files = sorted(spool.folder.glob("*.arrows"))
    data = bytearray(first.read_bytes())
    data[-900:-200] = b"\xff" * 700
    first.write_bytes(bytes(data))
    async with start_service(**settings(root)) as service:
        await eventually(lambda: not any(root.iterdir()))
    seqs = [row["seq"] for row in service.rows(SEQS)]
    lost = service.rows("SELECT sum(value) AS lost FROM events WHERE type = 'gap'")[0]["lost"]

    assert len(files) > 1
    assert 1 == lost == 6 - len(seqs)


async def test_missing_spool_folder_is_not_an_error(start_service, eventually, root):
    async with start_service(**settings(root / "later")) as service:
        make_spool(root / "later", "dead", 2)
        await eventually(lambda: not any((root / "later").iterdir()))

    assert 2 == len(service.rows(SEQS))


async def test_spool_without_records_is_removed(start_service, eventually, root):
    spool = Spool(str(root), "dead", max_bytes=1 << 20)
    spool.open(
        Registration(
            run="r", rank=0, world_size=1, local_rank=0, host="h", pid=1, incarnation="dead", launch_id="l", url=""
        )
    )
    assert spool._lock is not None
    spool._lock.release()  # killed before its first record
    async with start_service(**settings(root)) as service:
        await eventually(lambda: not any(root.iterdir()))

    assert NOTHING == -1
    assert [] == service.rows("SELECT * FROM events WHERE type = 'launch'")


async def test_spools_are_claimed_in_groups_and_released_ones_come_last(root, monkeypatch):
    """There may be thousands of spools after an outage of the service, and each costs an open file."""
    monkeypatch.setattr(spools_module, "MAX_CLAIMED", 2)
    for number in (3, 1, 2, 4):
        make_spool(root, f"dead-{number}", 2)
    spools = Spools([str(root)], None)
    first = await spools.find()
    again = await spools.find()
    spools.release(first[0].url, "rejected")
    await spools.remove(first[1].url)
    then = await spools.find()
    spools.close()

    assert ["dead-1", "dead-3"] == sorted(who.incarnation for who in first)
    assert [] == again
    assert ["dead-2", "dead-4"] == sorted(who.incarnation for who in then)


async def test_service_starts_after_an_error_in_the_scan_for_spools(
    start_service, eventually, root, monkeypatch, caplog
):
    make_spool(root, "dead", 2)
    real, failures = Spools.find, iter([MemoryError("no room")])

    async def find(self: Spools) -> list[Registration]:
        for failure in failures:
            raise failure
        return await real(self)

    monkeypatch.setattr(Spools, "find", find)
    async with start_service(**settings(root)):
        await eventually(lambda: not any(root.iterdir()))

    assert "unexpected error in scanning for spools" in caplog.text


async def test_hanging_disk_delays_the_start_by_a_limited_time(
    start_service, fake_rank, eventually, root, monkeypatch, caplog
):
    monkeypatch.setattr(orphan_spools, "START_SECONDS", 0.1)
    make_spool(root, "dead", 2, run="other")
    real, answers = Spools.find, asyncio.Event()

    async def find(self: Spools) -> list[Registration]:
        await answers.wait()
        return await real(self)

    monkeypatch.setattr(Spools, "find", find)
    async with start_service(**settings(root)) as service, fake_rank() as rank:
        rank.publish_steps(2)
        await rank.register(service.url)
        await eventually(lambda: rank.committed == 1)
        answers.set()
        await eventually(lambda: not any(root.iterdir()))

    assert "scan timed out" in caplog.text


async def test_error_with_one_spool_does_not_affect_the_others(start_service, eventually, root, monkeypatch):
    original = orphan_spools.check_registration

    def check(registration):
        if registration.incarnation == "broken":
            raise TypeError("not foreseen")
        original(registration)

    monkeypatch.setattr(orphan_spools, "check_registration", check)
    make_spool(root, "broken", 3, started_at=1)
    make_spool(root, "dead", 3, started_at=2)
    async with start_service(**settings(root)) as service:
        await eventually(lambda: [path.name for path in root.iterdir()] == ["broken"])

    assert {"dead"} == {row["incarnation"] for row in service.rows(SEQS)}
