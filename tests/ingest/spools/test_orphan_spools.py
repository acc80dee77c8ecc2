"""Spools of dead processes: the service stores them once, in their own run and attempt, with the right state."""

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.spool_ranks import record
from tests.programs import run_command

from rankscope_contract.model.events import Event
from rankscope_contract.wire.channel import Registration
from rankscope_contract.wire.spool import take_lock
from rankscope_exporter.publish.ring import encode
from rankscope_exporter.publish.spool import Spool
from rankscope_ingest.spools import orphan_spools
from rankscope_ingest.spools.orphan_spools import Spools

SEQS = "SELECT incarnation, attempt, seq FROM scalars WHERE name = 'loss' ORDER BY ALL"
EXIT = Event(type="exit", details='{"reason": "completed", "last_step": 9}')


def make_spool(
    root: Path,
    incarnation: str,
    steps: int,
    *events: Event,
    first: int = 0,
    service: str | None = None,
    max_bytes: int = 1 << 30,
    **who: Any,
) -> Spool:
    """Create the spool of a process that was killed after `steps` records, with `events` in the last one."""
    facts = {"run": "r", "rank": 0, "world_size": 1, "launch_id": "launch", "started_at": 7} | who
    spool = Spool(str(root), incarnation, max_bytes=max_bytes, service=service)
    spool.open(Registration(local_rank=0, host="here", pid=1, incarnation=incarnation, url="", **facts))
    for seq in range(first, steps):
        spool.append(seq, encode(record(seq, *(events if seq == steps - 1 else ()))))
    if spool._lock is not None and first == steps:
        spool._lock.close()  # `close` deletes a spool without records
    else:
        spool.close()
    return spool


def settings(root: Path) -> dict[str, Any]:
    return {"spool.folders": [str(root)], "spool.scan_seconds": 0.1}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def drained(start_service, eventually, root):
    """Return a function that runs a service until only the folders `left` remain, and returns it with its run."""

    async def drain(*left: str, state: str | None = None, **changes: Any) -> tuple[Any, Any]:
        async with start_service(**settings(root) | changes) as service:
            await eventually(lambda: {path.name for path in root.iterdir()} == set(left))
            run = await eventually(lambda: _state(service, state)) if state else None
        return service, run

    return drain


async def _state(service: Any, wanted: str) -> Any:
    state = await service.run_state()
    return state if state["state"] == wanted else None


async def _die(rank: Any, service: Any, steps: int) -> None:
    """Let a rank publish and report `steps` records that the service does not receive, and die."""
    rank.publish_steps(steps)
    rank.behave = lambda _: asyncio.sleep(60)
    await rank.register(service.url)
    await rank.die()


def seqs_by_run(service: Any) -> dict[str, list[int]]:
    query = "SELECT run, list(seq ORDER BY seq) AS seqs FROM scalars WHERE name = 'loss' GROUP BY run"
    return {row["run"]: row["seqs"] for row in service.rows(query)}


async def test_spools_are_stored_and_deleted_at_the_start(start_service, eventually, root):
    """A service that was moved to another host reads spools that name its earlier address."""
    # A torn end loses only the torn record. A damaged record in the middle is counted as lost.
    make_spool(root, "dead", 10, EXIT)
    make_spool(root, "moved", 3, EXIT, run="moved", service="http://earlier:9470")
    (file,) = make_spool(root, "torn", 5, run="torn").folder.glob("*.arrows")
    file.write_bytes(file.read_bytes()[:-100])
    first, *_ = files = sorted(make_spool(root, "damaged", 6, run="damaged", max_bytes=32_000).folder.glob("*.arrows"))
    data = bytearray(first.read_bytes())
    data[-900:-200] = b"\xff" * 700
    first.write_bytes(bytes(data))
    make_spool(root, "empty", 0, run="empty")  # killed before its first record
    async with start_service(**settings(root)) as service:
        await eventually(lambda: not any(root.iterdir()))
        state = await eventually(lambda: _state(service, "completed"))
        served = {target["incarnation"]: target for target in await service.targets()}["dead"]
        sd = await service.get("/sd")
    stored = seqs_by_run(service)
    gaps = service.rows("SELECT run, sum(value) AS lost FROM events WHERE type = 'gap' GROUP BY run")

    assert len(files) > 1
    assert {"r": [*range(10)], "moved": [0, 1, 2], "torn": [0, 1, 2, 3], "damaged": stored["damaged"]} == stored
    assert (5, [{"run": "damaged", "lost": 1.0}]) == (len(stored["damaged"]), gaps)
    tensors = service.rows("SELECT seq FROM tensor_stats WHERE run = 'r' ORDER BY seq")
    assert list(range(10)) == [row["seq"] for row in tensors]
    assert ("service", 9, 0) == (served["served_by"], served["committed"], state["records_lost"])
    assert [] == service.rows("SELECT * FROM events WHERE type = 'launch' AND run = 'empty'")
    assert "[]" == sd[1]


async def test_stored_records_of_a_spool_are_not_stored_again(drained, root):
    """A service that was killed between commit and deletion leaves such spools, with or without later records."""
    for steps in (6, 10):
        make_spool(root, "dead", steps)
        make_spool(root, "done", 10, EXIT, run="s")
        service, _ = await drained()

    assert {"r": [*range(10)], "s": [*range(10)]} == seqs_by_run(service)


async def test_spool_of_a_live_process_is_not_read(start_service, eventually, root):
    make_spool(root, "dead", 3)
    spool = make_spool(root, "alive", 3)
    lock = take_lock(root / "alive")
    assert lock is not None
    async with start_service(**settings(root)) as service:
        await eventually(lambda: [path.name for path in root.iterdir()] == ["alive"])
        await eventually(lambda: service.snapshots)
        assert (spool.folder / f"{0:012d}.arrows").exists()
        lock.close()
        await eventually(lambda: not any(root.iterdir()))
    assert {"dead", "alive"} == {row["incarnation"] for row in service.rows(SEQS)}


@pytest.mark.parametrize(
    ("reported", "first", "seqs", "lost"), [(7, 0, [*range(7)], 0), (10, 6, [0, 1, 2, 3, 6, 7, 8], 3)]
)
async def test_spool_of_a_known_rank_is_read_from_its_cursor(
    start_service, fake_rank, eventually, root, reported, first, seqs, lost
):
    """The service did not poll the last records. Those that are missing in the spool are counted as lost."""
    async with start_service(**settings(root)) as service, fake_rank() as rank:
        await rank.deliver(service, 4)
        await _die(rank, service, reported - 4)
        make_spool(root, rank.registration.incarnation, max(seqs) + 1, first=first)
        await eventually(lambda: not any(root.iterdir()))
        state = await eventually(lambda: _state(service, "failed"))
        (target,) = await service.targets()
    gaps = service.rows("SELECT details FROM events WHERE type = 'gap' ORDER BY ordinal")

    assert seqs == [row["seq"] for row in service.rows(SEQS)]
    assert (lost, lost) == (state["records_lost"], target["records_lost"])
    assert lost == sum(json.loads(row["details"])["records"] for row in gaps)
    assert "stopped responding" in state["reason"]


async def test_last_step_of_a_failed_run_is_that_of_its_spool(start_service, fake_rank, eventually, root):
    """The service finds the spool after it has stored the state of the failed run."""
    async with start_service(**settings(root)) as service, fake_rank(planned_steps=100) as rank:
        await rank.deliver(service, 4)
        await rank.die()
        await eventually(lambda: _state(service, "failed"))
        make_spool(root, rank.registration.incarnation, 7, planned_steps=100)
        await eventually(lambda: not any(root.iterdir()))
        await eventually(lambda: service.rows("SELECT 1 FROM attempts WHERE state = 'failed' AND last_step > 3"))
    printed = [run_command(*one, "--store", service.store).stdout for one in (("runs",), ("summary", "r"))]

    assert [True, True] == ["6/100" in one.replace(" / ", "/") for one in printed]


async def test_lost_records_of_an_earlier_service_are_undone_by_the_spool(
    start_service, fake_rank, eventually, root, drained
):
    async with start_service() as service, fake_rank() as rank:
        await rank.deliver(service, 4)
        await _die(rank, service, 6)
        lost = await eventually(lambda: _state(service, "failed"))
    make_spool(root, rank.registration.incarnation, 10, EXIT)
    service, found = await drained(state="completed")
    gaps = service.rows("SELECT details FROM events WHERE type = 'gap' ORDER BY ordinal")

    assert (6, 0) == (lost["records_lost"], found["records_lost"])
    assert 0 == sum(json.loads(row["details"])["records"] for row in gaps)
    assert list(range(10)) == [row["seq"] for row in service.rows(SEQS)]


async def test_dead_process_keeps_the_attempt_of_its_launch(start_service, fake_rank, eventually, root, drained):
    """The next launch has the same launch id: processes without a process group derive equal ids."""
    async with start_service() as service, fake_rank() as rank:
        await rank.deliver(service, 2)
        await rank.die()
        await eventually(lambda: _state(service, "failed"))
        async with fake_rank(incarnation="second") as second:
            await second.deliver(service, 3)
            second.state = "draining"
            await eventually(lambda: _state(service, "stopped"))
    make_spool(root, rank.registration.incarnation, 5, EXIT)
    service, _ = await drained()
    rows = service.rows("SELECT incarnation, attempt, count(*) AS n FROM scalars GROUP BY ALL ORDER BY ALL")

    assert [("inc-r-0", 0, 5), ("second", 1, 3)] == [tuple(row.values()) for row in rows]


async def test_spool_of_a_static_target_keeps_its_configured_identity(start_service, fake_rank, eventually, root):
    async with fake_rank() as rank:
        rank.publish_steps(2)
        static = {"url": rank.registration.url, "run": "named-here", "rank": 3, "world_size": 4}
        async with start_service(**settings(root), targets=[static]) as service:

            async def is_read() -> bool:
                return [target["cursor"] for target in await service.targets()] == [1]

            await eventually(is_read)
            await rank.die()
            make_spool(root, rank.registration.incarnation, 5, EXIT)
            await eventually(lambda: not any(root.iterdir()))
    rows = service.rows("SELECT run, rank, seq FROM scalars ORDER BY seq")

    assert [("named-here", 3, seq) for seq in range(5)] == [tuple(row.values()) for row in rows]


async def test_live_rank_with_the_identity_of_a_spool_is_not_affected(start_service, fake_rank, eventually, root):
    """An elastic restart without a process group has the same run, launch and rank while the old spool is drained."""
    async with start_service(**settings(root)) as service, fake_rank(incarnation="new") as rank:
        await rank.deliver(service, 2)
        make_spool(root, "old", 5, EXIT)
        await eventually(lambda: not any(root.iterdir()))
        await rank.deliver(service, 2)
        assert 200 == (await rank.register(service.url))[0]
        await eventually(lambda: _state(service, "running"))  # updated once a second
    rows = service.rows("SELECT incarnation, count(*) AS n FROM scalars GROUP BY ALL")

    assert {"old": 5, "new": 4} == {row["incarnation"]: row["n"] for row in rows}


def _change(old: str, new: str) -> Any:
    def change(folder: Path) -> None:
        path = folder / "identity.json"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return change


FUTURE = '{"format": 9, "registration": {"schema_version": 1}}'
SPOILED = {
    "torn": (
        lambda folder: (folder / "identity.json").write_text("{"),
        "is incomplete or no spool file (JSONDecodeErr",
    ),
    "missing": (lambda folder: (folder / "identity.json").unlink(), "cannot be read"),
    "future": (lambda folder: (folder / "identity.json").write_text(FUTURE), "format 9"),
    "impossible": (_change('"rank": 0', '"rank": 7'), "does not fit world_size"),
    "foreign": (_change('"world_size": 1', '"world_size": null'), "world_size is None"),
    "copied": (_change('"copied"', '"original"'), "was renamed or copied"),
}


async def test_unreadable_folder_is_reported_and_not_changed(start_service, eventually, root, caplog):
    async with start_service(**settings(root)) as service:  # there is no folder yet, which is no error
        for name, (spoil, _) in SPOILED.items():
            spoil(make_spool(root.parent, name, 3).folder)
            root.mkdir(exist_ok=True)
            (root.parent / name).rename(root / name)
        make_spool(root, "whole", 3)
        (root / "empty").mkdir()
        (root / "foreign.txt").write_text("no spool")
        await eventually(lambda: not (root / "whole").exists())
        await eventually(lambda: all(text in caplog.text for _, text in SPOILED.values()))
        shown = len(service.snapshots)
        await eventually(lambda: len(service.snapshots) > shown)

    assert {*SPOILED, "empty", "foreign.txt"} == {path.name for path in root.iterdir()}
    assert all((root / name / f"{0:012d}.arrows").exists() for name in SPOILED)
    assert {"whole"} == {row["incarnation"] for row in service.rows(SEQS)}
    for _, text in SPOILED.values():
        assert 1 == sum(text in message for message in caplog.messages)


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


async def test_spool_that_waits_for_a_commit_is_not_counted_as_lost(drained, root):
    """The store commits nothing for longer than the timeout of a rank."""
    make_spool(root, "dead", 40, EXIT)
    limits = {"runs.failed_after_seconds": 0.4, "ingest.max_pending_rows": 10, "ingest.flush_rows": 10}
    slow = {"ingest.flush_after_seconds": 1.5, "ingest.max_bytes": 65_536, "ingest.poll_seconds": 0.2}
    service, state = await drained(state="completed", **limits, **slow)

    assert ([], 0) == (service.rows("SELECT * FROM events WHERE type = 'gap'"), state["records_lost"])
    assert 40 == len(service.rows(SEQS))


async def test_spools_are_claimed_in_groups_and_released_ones_come_last(root, monkeypatch):
    """There may be thousands of spools after an outage of the service, and each costs an open file."""
    monkeypatch.setattr(orphan_spools, "MAX_CLAIMED", 2)
    for number in (3, 1, 2, 4):
        make_spool(root, f"dead-{number}", 2)
    spools = Spools([str(root)], None, None, accept=None, watermark=None, follow=None)
    first = await spools.find()
    again = await spools.find()
    spools.release(first[0].url, "rejected")
    await spools.remove(first[1].url)
    then = await spools.find()
    spools.close()

    assert ["dead-1", "dead-3"] == sorted(who.incarnation for who in first)
    assert [] == again
    assert ["dead-2", "dead-4"] == sorted(who.incarnation for who in then)


async def test_rest_of_a_removed_spool_is_removed_that_of_another_service_is_not(root, caplog):
    """A reader that is killed while it removes a folder leaves the lock file alone in it."""
    (make_spool(root, "rest", 0).folder / "identity.json").unlink()
    other = make_spool(root, "other", 2, run="not mine").folder
    spools = Spools([str(root)], None, None, accept=None, watermark=None, follow=None, owns=lambda run: run == "r")

    assert [[], []] == [await spools.find(), await spools.find()]
    assert [other] == list(root.iterdir())
    assert [] == caplog.messages
    with take_lock(other) as lock:
        assert lock


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
        await rank.deliver(service, 2)
        answers.set()
        await eventually(lambda: not any(root.iterdir()))

    assert "scan timed out" in caplog.text


async def test_error_with_one_spool_does_not_affect_the_others(drained, root, monkeypatch):
    original = orphan_spools.check_registration

    def check(registration):
        if registration.incarnation == "broken":
            raise TypeError("not foreseen")
        original(registration)

    monkeypatch.setattr(orphan_spools, "check_registration", check)
    make_spool(root, "broken", 3, started_at=1)
    make_spool(root, "dead", 3, started_at=2)
    service, _ = await drained("broken")

    assert {"dead"} == {row["incarnation"] for row in service.rows(SEQS)}
