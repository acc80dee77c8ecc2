"""The spool of a rank: the files on disk after the process is killed at any system call."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rankscope_contract.model.events import Event
from rankscope_contract.model.schema import PlanEntry
from rankscope_contract.wire.channel import Registration
from rankscope_contract.wire.spool import Orphan, SpoolReader, message_ends, segments
from rankscope_exporter.publish.ring import OPTIONAL, EncodedRecord, encode, stream
from rankscope_exporter.publish.spool import BEHIND, FAILED, FULL, KEPT_COLUMNS, Spool, needed_plans
from rankscope_exporter.records.record import Scalar, StepRecord

LIFE = {"started_at": 5, "planned_steps": 100, "config": {"every": 1}}
WHO = Registration(
    run="r", rank=0, world_size=1, local_rank=0, host="h", pid=1, incarnation="i0", launch_id="l0", url="", **LIFE
)
EARLIER = Path(__file__).parents[2] / "data" / "spool" / "i0"
ENTRY = PlanEntry(kind="param_after", tensor="w", shape=(2,))
OTHER = PlanEntry(kind="param_after", tensor="v", shape=(2,))


def plain(step: int, **more: Any) -> EncodedRecord:
    return encode(
        StepRecord(ts=1_700_000_000_000_000 + step, step=step, scalars=(Scalar("loss", float(step)),), **more)
    )


@pytest.fixture
def record(record: Callable[..., StepRecord]) -> Callable[..., EncodedRecord]:
    return lambda *arguments, **more: encode(record(*arguments, **more))


def made(root: Path, records: int = 0, *, max_bytes: int = 1 << 30, sync: bool = False) -> Spool:
    spool = Spool(str(root), "i0", max_bytes=max_bytes, sync=sync)
    spool.open(WHO)
    for seq in range(records):
        spool.append(seq, plain(seq))
    return spool


def die(spool: Spool) -> None:
    """Close the files, as the system does for a killed process."""
    if spool._file >= 0:
        os.close(spool._file)
        spool._file = -1
    if spool._lock is not None:
        spool._lock.close()


def found(root: Path) -> list[int]:
    """Return the sequence numbers that the next process can read, without changing the folder."""
    folder = root / "i0"
    orphan = Orphan.take(SpoolReader(folder, pa, needed_plans)) if folder.exists() else None
    if orphan is None:
        assert [] == list(folder.glob("*"))  # its removal was interrupted
        return []
    seqs: list[int] = []
    while (part := orphan.after(seqs[-1] if seqs else -1, 1 << 20)) is not None:
        rows = pa.ipc.open_stream(part.data).read_all()["seq"].to_pylist()
        assert list(range(part.first, part.last + 1)) == rows
        seqs += rows
    orphan.release()
    return seqs


def test_spooled_records_equal_the_published_ones(tmp_path, record):
    spool = made(tmp_path)
    records = [record(step, [ENTRY], [{"norm": 1.0 + step}], scalars=(Scalar("loss", 0.5),)) for step in range(5)]
    for seq, one in enumerate(records):
        spool.append(seq, one)
    die(spool)
    orphan = Orphan.take(SpoolReader(tmp_path / "i0", pa, needed_plans))
    assert orphan is not None
    part = orphan.after(-1, 1 << 20)
    assert part is not None
    plan = records[0].record.statistics.plan

    served = pa.ipc.open_stream(stream(0, records)).read_all()
    assert served == pa.ipc.open_stream(part.data).read_all()
    assert plan.json == orphan.reader.plan(plan.hash)
    assert WHO == orphan.registration
    assert 4 == orphan.head


def test_spool_of_the_release_of_november_2026_has_the_same_cells(tmp_path, record):
    """The golden file has all columns in each record, as that release wrote them."""
    shutil.copytree(EARLIER, tmp_path / "i0")
    events, loss = (Event(type="note", message="m"),), (Scalar("loss", 0.0),)
    first = record(0, [ENTRY], [{"norm": 1.0, "numel": 2}], scalars=loss)
    orphan = Orphan.take(SpoolReader(tmp_path / "i0", pa, needed_plans))
    assert orphan is not None
    part = orphan.after(-1, 1 << 20)
    assert part is not None

    expected = stream(0, [first, plain(1, events=events), plain(2, clock_offset=5)], OPTIONAL)
    assert pa.ipc.open_stream(expected).read_all() == pa.ipc.open_stream(part.data).read_all()
    assert WHO == orphan.registration
    orphan.release()


def test_file_has_only_columns_that_its_latest_records_need(tmp_path):
    spool = made(tmp_path, 3)
    spool.append(3, plain(3, events=(Event(type="note"),)))
    for seq in range(4, 2 * KEPT_COLUMNS):
        spool.append(seq, plain(seq))
    files = segments(spool.folder)
    spool.close()

    assert [0, 3, 3 + KEPT_COLUMNS] == [first for first, _ in files]
    names = [set(pa.ipc.open_stream(path.read_bytes()).schema.names) for _, path in files]
    assert [{"scalars"}, {"scalars", "events"}, {"scalars"}] == [OPTIONAL & columns for columns in names]


def test_spool_files_are_private(tmp_path, record):
    spool = made(tmp_path / "deep" / "spool")
    spool.append(0, record(0, [ENTRY], [{"norm": 1.0}]))
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in spool.folder.iterdir()}

    assert 0o700 == stat.S_IMODE(spool.folder.stat().st_mode)
    assert {0o600} == set(files.values())
    assert {"lock", "identity.json", "000000000000.arrows"} < set(files)
    spool.close()


def test_truncated_file_has_all_records_before_the_cut(tmp_path):
    die(made(tmp_path, 4))
    ((_, path),) = segments(tmp_path / "i0")
    whole = path.read_bytes()
    ends = message_ends(whole)

    assert 5 == len(ends)
    for cut in {0, 1, 7, *(end + shift for end in ends for shift in (-1, 0, 1, 9)), len(whole) // 2}:
        path.write_bytes(whole[:cut])
        reader = SpoolReader(tmp_path / "i0", pa, needed_plans)
        wanted = sum(end <= cut for end in ends[1:])
        part = reader.after(-1, 1 << 20)

        assert wanted - 1 == reader.head()
        assert wanted == (0 if part is None else part.rows)


def test_files_rotate_and_are_deleted_after_their_commit(tmp_path):
    spool = made(tmp_path, 3)
    spool.commit(1)
    spool.close()
    assert [0, 1, 2] == found(tmp_path)
    shutil.rmtree(spool.folder)

    spool = made(tmp_path, 30, max_bytes=8 * 5_000)
    firsts = [first for first, _ in segments(spool.folder)]
    spool.commit(firsts[2] - 1)

    assert len(firsts) > 4
    assert firsts[2:] == [first for first, _ in segments(spool.folder)]
    spool.commit(29)
    assert firsts[-1:] == [first for first, _ in segments(spool.folder)]  # the file that is open for writing
    spool.close()
    assert [] == list(tmp_path.iterdir())


def test_spool_sync_syncs_records_plans_and_folder_entries(tmp_path, record, monkeypatch):
    """After a power failure, a record needs its plan, and a file needs its folder entry."""
    synced: list[str] = []
    for call in ("fsync", "fdatasync"):
        real = getattr(os, call)

        def noting(descriptor: int, real: Any = real) -> None:
            synced.append(os.path.relpath(Path(f"/proc/self/fd/{descriptor}").readlink(), tmp_path))
            real(descriptor)

        monkeypatch.setattr(os, call, noting)
    spool = made(tmp_path, sync=True)
    spool.append(0, record(0, [ENTRY], [{"norm": 1.0}]))
    spool.append(1, record(1, [ENTRY], [{"norm": 1.0}]))
    spool.close()
    segment = f"i0/{0:012d}.arrows"
    (plan,) = (path.name for path in (tmp_path / "i0").glob("plan-*"))

    assert [".i0/identity.json.tmp", ".", f"i0/{plan}.tmp", "i0"] == synced[:4]
    assert [segment, "i0", segment, segment] == synced[4:]


def test_oldest_records_are_deleted_and_counted_at_the_limit(tmp_path):
    spool = made(tmp_path, 40, max_bytes=60_000)
    size = sum(path.stat().st_size for _, path in segments(spool.folder))
    die(spool)
    kept = found(tmp_path)

    assert kept == list(range(kept[0], 40))
    assert {FULL: kept[0], FAILED: 0, BEHIND: 0} == spool.dropped
    assert kept[0] > 0
    assert size <= 60_000


def test_deleted_committed_records_are_not_counted(tmp_path):
    spool = made(tmp_path, max_bytes=60_000)
    for seq in range(40):
        spool.append(seq, plain(seq))
        spool.commit(seq)
    spool.close()

    assert {FULL: 0, FAILED: 0, BEHIND: 0} == spool.dropped


def test_record_larger_than_the_limit_is_counted(tmp_path):
    spool = made(tmp_path, 1, max_bytes=60_000)
    spool.append(1, plain(1, modules=({"module": "m", "class": "c", "stack": os.urandom(60_000).hex()},)))
    spool.append(2, plain(2))
    files = len(segments(spool.folder))
    die(spool)

    assert [0, 2] == found(tmp_path)
    assert 1 == spool.dropped[FULL]
    assert 2 == files, "no sequence number is missing within a file"


@pytest.mark.parametrize("room", [0, 1, 100])
def test_full_disk_loses_only_records_without_space(tmp_path, monkeypatch, room):
    """A partly written record is truncated, and the file continues when there is space again."""
    spool = made(tmp_path, 1)
    real, left = os.write, room

    def write(descriptor: int, data: Any) -> int:
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(descriptor, data[:left])
        left -= written
        return written

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        for seq in (1, 2):
            with pytest.raises(OSError, match="No space"):
                spool.append(seq, plain(seq))
    spool.append(3, plain(3))
    die(spool)

    assert [0, 3] == found(tmp_path)
    assert 2 == spool.dropped[FAILED]


class KilledError(BaseException):
    """The process was killed: none of its later operations takes place."""


class Fuse:
    """Permits `calls` system calls that change the disk; the last write may be incomplete."""

    NAMES = ("open", "write", "ftruncate", "rename", "replace", "unlink", "mkdir", "rmdir")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: int, *, torn: bool) -> None:
        self.left, self.torn, self.blown = calls, torn, False
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self.left == 0 and not self.blown and name == "write" and self.torn:
                descriptor, data = arguments
                real(descriptor, data[: len(data) // 2])
            self.blown |= self.left == 0
            if self.blown:
                raise KilledError(name)
            self.left -= 1
            return real(*arguments, **named)

        return call


class Story:
    """A complete run of a spool: two plans, several files, commits and close."""

    def __init__(self, root: Path) -> None:
        self.spool = Spool(str(root), "i0", max_bytes=8 * 5_000)
        self.kept = self.committed = -1

    def live(self, record: Callable[..., EncodedRecord]) -> None:
        self.spool.open(WHO)
        for seq in range(9):
            entry, more = ENTRY if seq < 6 else OTHER, {"events": (Event(type="note"),)} if seq == 7 else {}
            self.spool.append(seq, record(seq, [entry], [{"norm": 1.0}]) if seq % 3 == 0 else plain(seq, **more))
            self.kept = seq
            if seq in (3, 5):
                self._commit(seq - 1)
        self._commit(8)
        self.spool.close()

    def _commit(self, seq: int) -> None:
        self.committed = seq  # durable before the rank gets the commit
        self.spool.commit(seq)


def lives_cut_short(tmp_path: Path, record: Any) -> Iterator[tuple[Story, Path, bool]]:
    """Yield one run for each system call at which the process may be killed."""
    for torn in (False, True):
        for calls in range(1000):
            root = tmp_path / f"{calls}-{torn}"
            story = Story(root)
            with pytest.MonkeyPatch.context() as monkeypatch:
                fuse = Fuse(monkeypatch, calls, torn=torn)
                with contextlib.suppress(KilledError):
                    story.live(record)
            die(story.spool)
            yield story, root, fuse.blown
            if not fuse.blown:
                break


def test_records_survive_a_kill_at_any_system_call(tmp_path, record):
    lives = list(lives_cut_short(tmp_path, record))
    for story, root, was_killed in lives:
        seqs = found(root)
        wanted = set(range(story.committed + 1, story.kept + 1))

        assert wanted <= set(seqs) <= set(range(story.kept + 2))
        assert sorted(set(seqs)) == seqs
        assert was_killed or not (root / "i0").exists()
    assert len(lives) > 60


def test_records_are_stored_once_if_the_reader_is_killed(tmp_path):
    """The store is a model: it commits records and their watermark together, as the real store."""
    for calls in range(1000):
        root = tmp_path / str(calls)
        die(made(root, 9, max_bytes=8 * 5_000))
        table: list[int] = []
        with pytest.MonkeyPatch.context() as monkeypatch:
            fuse = Fuse(monkeypatch, calls, torn=False)
            with contextlib.suppress(KilledError):
                drain(root, table)
        drain(root, table)

        assert list(range(9)) == table
        assert [] == list(root.iterdir())
        if not fuse.blown:
            break
    assert calls >= 8


def drain(root: Path, table: list[int]) -> None:
    """Read above the watermark, store, commit and delete, as service and exporter do."""
    folder = root / "i0"
    orphan = Orphan.take(SpoolReader(folder, pa, needed_plans)) if folder.exists() else None
    if orphan is None:
        if folder.exists():
            folder.rmdir()  # the folder is empty; also the lock is deleted
        return
    try:
        while (part := orphan.after(len(table) - 1, 5_000)) is not None:
            table += range(part.first, part.last + 1)
            orphan.commit(part.last)
        orphan.commit(len(table) - 1)
        assert orphan.is_done
        orphan.remove()
    finally:
        orphan.release()


def test_lock_is_held_until_its_process_exits_also_with_a_forked_child(tmp_path):
    spool = made(tmp_path, 1)
    (reading, writing), (hearing, saying) = os.pipe(), os.pipe()

    assert Orphan.take(SpoolReader(spool.folder, pa, needed_plans)) is None
    child = os.fork()
    if child == 0:
        spool.abandon()  # as the fork handler does; the child then outlives its parent
        os.close(writing)
        os.write(saying, b"1" if Orphan.take(SpoolReader(spool.folder, pa, needed_plans)) is None else b"0")
        os.read(reading, 1)  # until the parent releases it
        os._exit(0)
    try:
        assert b"1" == os.read(hearing, 1)
        spool.append(1, plain(1))  # the parent is not affected
        die(spool)
        assert [0, 1] == found(tmp_path)
    finally:
        for end in (reading, writing, hearing, saying):
            os.close(end)
        os.waitpid(child, 0)


def test_damage_loses_only_the_rest_of_its_file(tmp_path, caplog):
    die(made(tmp_path, 9, max_bytes=8 * 5_000))
    (first, path), (second, _), *_ = segments(tmp_path / "i0")
    data = bytearray(path.read_bytes())
    start = message_ends(bytes(data))[1]
    data[start + 400 : start + 600] = b"\xff" * 200
    path.write_bytes(bytes(data))

    assert 0 == first < second
    assert [0, *range(second, 9)] == found(tmp_path)
    assert "is damaged from seq 1 on" in caplog.text


def test_after_limits_the_bytes_of_an_answer(tmp_path):
    spool = made(tmp_path, 6)
    schema, *ends = message_ends(segments(spool.folder)[0][1].read_bytes())
    size = (ends[-1] - schema) // 6
    few, one = spool.after(0, 2 * size), spool.after(4, 1)

    assert [(1, 2), (5, 5)] == [(part.first, part.last) for part in (few, one)]
    assert spool.after(5, 1 << 20) is None
    spool.close()


def test_record_with_a_missing_plan_and_too_large_file_are_not_read(tmp_path, record, caplog):
    spool = made(tmp_path, 1)
    spool.append(1, record(1, [ENTRY], [{"norm": 1.0}]))
    die(spool)
    for plan in (tmp_path / "i0").glob("plan-*.json"):
        plan.write_text("{}")
    with (tmp_path / "i0" / f"{2:012d}.arrows").open("wb") as file:
        file.truncate(1 << 40)

    assert [0] == found(tmp_path)
    assert "1099511627776 bytes" in caplog.text
