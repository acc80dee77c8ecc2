"""Logs that are followed on this machine and over SSH: the conditions of a training, restarts, and the rows."""

import gzip
import json
import os
import re
import threading
import time

import pytest
from tests.ingest.watch.conftest import Replay, Sshd, imported_rows, keygen, later, steps_in, trust

from rankscope_ingest.base.config import WatchSection
from rankscope_ingest.base.errors import ConfigError
from rankscope_ingest.pipeline.maintenance_schedule import COMPACT_EVERY_COMMITS
from rankscope_ingest.watch.files import LogUnreadableError
from rankscope_ingest.watch.watcher import check_logs
from rankscope_storage.api.store import Writer
from rankscope_storage.base.errors import StoreError
from rankscope_storage.connection import connect
from rankscope_storage.maintenance.compaction import CompactionReport
from rankscope_view.data.events import Group, event_lines
from rankscope_view.data.incidents import incidents
from rankscope_view.data.runs import run_row

PLANNED = "/   20000 |"
TRACEBACK = ["Traceback (most recent call last):", "RuntimeError: CUDA error: device-side assert triggered"]


async def test_recovered_training_is_reported_and_armed_again(watch, replay, slow_lines):
    """S0-18: a second stall after the recovery is reported, too."""
    async with watch.session() as session:
        await watch.follow(session, slow_lines[:40], step=40)
        for begin, shift in ((40, 300.0), (60, 600.0)):
            replay.advance(250.0)
            await session.poll()
            replay.write([later(line, shift) for line in slow_lines[begin : begin + 20]])
            await session.poll()

    assert ["[critical] r: RunStalled", "[resolved] r: RunStalled"] * 2 == [
        title.split(",")[0] for title in watch.receiver.titles
    ]


async def test_slow_training_that_recovers_is_reported(watch, replay, slow_lines):
    fast = [later(line, 5000.0) for line in slow_lines[212:220]]
    fast = [re.sub(r"\(ms\): [\d.]+", "(ms): 2310.0", line) for line in fast]
    async with watch.session() as session:
        await watch.follow(session, slow_lines[:208], step=208)
        await watch.follow(session, fast, step=8)

    assert ["[warning] r: RunSlow", "[resolved] r: RunSlow"] == [title.split(",")[0] for title in watch.receiver.titles]
    assert "the step time is normal again" in watch.receiver.titles[1]


async def test_finished_training_is_reported_once(watch, replay, slow_lines, tmp_path):
    """S0-15: the last iteration is the planned one."""
    lines = [line.replace(PLANNED, "/     930 |") for line in slow_lines[:30]]
    for _ in range(2):
        async with watch.session() as session:
            replay.write(lines)
            await session.poll()
            replay.advance(5000.0)
            await session.poll()
            lines = []

            assert session.statuses[0].has_ended
    title = f"[info] r: RunFinished, {replay.path}, step 930: the last planned iteration, 930, was reached"
    assert [title] == watch.receiver.titles
    assert [{"state": "completed"}] == watch.query("SELECT state FROM runs")
    with connect(watch.folder) as connection:
        groups = {line.text: line.group for line in event_lines(connection, "r")}
        assert {} == incidents(connection, ["r"])
    assert Group.OTHER == groups["the last planned iteration, 930, was reached"]


async def test_failures_of_one_machine_are_one_report(watch, replay, slow_lines, tmp_path):
    """S0-17: one report per host, with the classes of the errors in each log."""
    other = tmp_path / "host/other.log"
    replay.write(slow_lines[:30])
    other.write_text("".join(f"{line}\n" for line in slow_lines[:20] + TRACEBACK))
    os.utime(other, (replay.now, replay.now))
    async with watch.session((str(replay.path), "a"), (str(other), "b")) as session:
        replay.write(TRACEBACK)
        for _ in range(3):
            await session.poll()
            replay.advance(40.0)
    (report,) = watch.receiver.messages
    states = watch.query("SELECT run, state, reason FROM runs ORDER BY run")

    assert f"[critical] a: RunFailed, {replay.path}, step 930: cuda: {TRACEBACK[1]}" == report.title
    assert "cuda: RuntimeError: CUDA error: device-side assert triggered" in report.body
    assert f"b, {other}: " in report.body
    assert ["failed", "failed"] == [row["state"] for row in states]
    assert [("a", "opened"), ("a", "notified"), ("b", "muted")] == [
        (row["run"], json.loads(row["details"])["state"])
        for row in watch.query("SELECT run, details FROM events WHERE type = 'incident' ORDER BY run, ordinal")
    ]


async def test_error_that_training_survives_is_no_failure(watch, replay, slow_lines):
    async with watch.session() as session:
        await watch.follow(session, [*slow_lines[:30], *TRACEBACK], step=32)
        await watch.follow(session, slow_lines[30:60], step=30)
        replay.advance(40.0)
        await session.poll()

        assert "training" == session.statuses[0].condition
    assert [] == watch.receiver.titles


async def test_names_that_are_not_kept_are_named_once_and_on_the_page(watch, replay, caplog):
    async with watch.session() as session:
        for begin in (1, 6):
            replay.write([f"step {step} | loss 2.5 | took 3.5x of Train 9 in" for step in range(begin, begin + 5)])
            await session.poll()
        replay.write([f"step {step} | loss 2.5 | waited 3.5x" for step in range(11, 15)])
        await session.poll()
    with connect(watch.folder) as connection:
        texts = [line.text for line in event_lines(connection, "r")]

    assert ["r: not kept: took, Train", "r: not kept: waited"] == caplog.messages
    assert "records of train.log; not kept: took, Train" in texts


async def test_start_lines_after_a_crash_are_of_the_next_attempt(watch, replay, tmp_path):
    """The failure is one incident, from the error until the first row of the next attempt."""
    rows = [f"step {step} loss {3 - step / 100:.2f}" for step in range(1, 61)]
    starts = ["Loading checkpoint out/50.pt", "loaded checkpoint at step 50"]
    replay.now = time.time()  # start lines at the end of an old log do not wait
    async with watch.session() as session:
        await watch.follow(session, rows, step=20)
        conditions = []
        for lines, seconds in ((TRACEBACK, 1.0), ([], 40.0), (starts[:1], 10.0), (starts[1:], 70.0), ([], 9.0)):
            replay.advance(seconds)
            if lines:
                replay.write(lines)
            await session.poll()
            conditions.append(session.statuses[0].state)
        replay.write([line.replace("loss", "loss ") for line in rows[50:55]], seconds=5.0)
        await session.poll()
        conditions.append(session.statuses[0].state)
    states = watch.query(
        "SELECT rule, details->>'$.state' AS state FROM events WHERE type = 'incident' ORDER BY ordinal"
    )

    assert ["training", *["failed"] * 4, "training"] == conditions
    assert "step 55" == session.statuses[0].reason  # the pause is no time between two rows
    assert [("RunFailed", state) for state in ("opened", "notified", "resolved")] == [
        tuple(row.values()) for row in states
    ]
    assert [(None, 1), (50, 1)] == [
        tuple(row.values())
        for row in watch.query("SELECT step, attempt FROM events WHERE type = 'checkpoint' ORDER BY seq")
    ]
    assert watch.rows() == imported_rows(tmp_path / "once", replay.path)


async def test_checkpoint_in_progress_is_no_stall(watch, replay, slow_lines):
    saving = next(number for number, line in enumerate(slow_lines) if line.startswith("saving"))
    async with watch.session() as session:
        await watch.follow(session, slow_lines[: saving + 1], step=saving + 1)
        replay.advance(600.0)
        await session.poll()
        during = session.statuses[0].condition
        replay.advance(1300.0)
        await session.poll()

        assert "training" == during
        assert "stalled" == session.statuses[0].condition
    assert "checkpoint may be in progress" in watch.receiver.messages[0].body


async def test_state_of_the_run_follows_the_log(watch, replay, slow_lines):
    def state() -> tuple[str, str, bool]:
        """Return the state, its reason, and whether the time left is known."""
        (row,) = watch.query("SELECT state, reason FROM runs")
        with connect(watch.folder) as connection:
            return row["state"], row["reason"], run_row(connection, "r").eta_seconds is not None

    async with watch.session() as session:
        await watch.follow(session, slow_lines[:40], step=40)
        running = state()
        replay.advance(300.0)
        await session.poll()
        stalled = state()

    assert ("running", "the log is followed", True) == running
    assert ("stalled", "no row for 300 s", False) == (stalled[0], stalled[1][:16], stalled[2])
    assert ("stopped", "the log is no longer followed") == state()[:2]


async def test_message_of_a_killed_watch_is_sent_by_the_next_one(watch, replay, slow_lines):
    """An incident that is stored but not sent is sent once, with a note that it may be repeated."""
    watch.receiver.is_broken, watch.finish_seconds = True, 0.1
    replay.write(slow_lines[:40])
    async with watch.session() as session:
        replay.advance(300.0)
        await session.watchers[0].poll()  # as the command does: messages are sent in the background
    watch.receiver.is_broken = False
    for _ in range(2):
        async with watch.session() as session:
            await session.poll()
    (message,) = watch.receiver.messages

    assert "RunStalled" in message.title
    assert "Sent again" in message.body
    assert "how to read the rows:" in message.body


async def test_young_log_is_imported_when_its_format_is_certain(watch, replay):
    """The first import decides the step of a log; a log of two lines would decide it for all later ones."""
    watch.settings = {"settle_seconds": 60.0}
    lines = [f"epoch 0 iter {number} loss {3 - number / 100:.4f}" for number in range(60)]
    async with watch.session() as session:
        replay.write(lines[:2])
        await session.poll()
        early = session.statuses[0].values
        replay.write(lines[2:50], seconds=61.0)
        await session.poll()
        replay.write(lines[50:], seconds=10.0)
        await session.poll()
    once = watch.folder.parent / "once"

    assert 0 == early
    assert watch.rows() == imported_rows(once, replay.path)


async def test_young_log_is_complete_after_a_rotation_and_a_restart(watch, replay):
    watch.settings = {"settle_seconds": 60.0}
    lines = [f"iter {number} loss {3 - number / 100:.4f}" for number in range(90)]
    async with watch.session() as session:
        replay.write(lines[:50])
        await session.poll()
        replay.path.rename(replay.path.with_name("train.log.1"))
        replay.write(lines[50:80])
        await session.poll()
    replay.write(lines[80:])
    async with watch.session() as session:
        await session.poll()

    assert [*range(90)] == watch.steps()


async def test_log_that_appears_later_is_waited_for(watch, replay, slow_lines):
    async with watch.session() as session:
        await session.poll()
        missing = session.statuses[0].unreadable
        await watch.follow(session, slow_lines[:20], step=20)

        assert missing is not None
        assert "No such file" in missing
        assert 920 == session.statuses[0].step


@pytest.mark.parametrize(
    ("logs", "error"),
    [
        (
            [{"log": "ssh://a/x/train.log"}, {"log": "ssh://b/x/train.log"}],
            "several logs would be stored as the run 'train'",
        ),
        ([{"log": "/x/train.log", "run": "a"}, {"log": "/x/train.log", "run": "b"}], "listed twice"),
        *(([{"log": log}], "ssh://") for log in ("ssh://user:secret@host/x.log", "ssh://host", "ssh://host/dir/")),
        *(([{"log": log}], "ssh://") for log in ("http://host/x.log", "ssh://h:x/y")),
    ],
)
def test_wrong_list_of_logs_is_refused_with_the_reason(logs, error):
    """The reason repeats no password of an address."""
    with pytest.raises(ConfigError, match=error) as refused:
        check_logs([WatchSection(**log) for log in logs])

    assert "secret" not in str(refused.value)


def test_logs_of_equal_names_may_be_stored_as_one_run():
    logs = check_logs([WatchSection(log=f"ssh://{host}/x/train.log", run="r") for host in "ab"])

    assert ["r", "r"] == [name for _, name in logs]


async def test_full_disk_is_displayed_and_no_row_is_lost(watch, replay, slow_lines, tmp_path, monkeypatch):
    def failing(*_: object) -> None:
        raise StoreError("no space left on device")

    async with watch.session() as session:
        await watch.follow(session, slow_lines[:30], step=30)
        with monkeypatch.context() as patch:
            patch.setattr(Writer, "append", failing)
            await watch.follow(session, slow_lines[30:50], step=20)
            during = session.statuses[0].unreadable
        await watch.follow(session, slow_lines[50:70], step=20)

        assert "training" == session.statuses[0].condition
        assert session.statuses[0].unreadable is None
    assert "the store: no space left on device" == during
    assert watch.rows() == imported_rows(tmp_path / "once", replay.path)


async def test_new_lines_are_stored_during_a_compaction(watch, replay, monkeypatch, eventually):
    begun, may_end, ended = threading.Event(), threading.Event(), []

    def blocked(_: Writer) -> CompactionReport:
        begun.set()
        ended.append(may_end.wait(60.0))
        return CompactionReport()

    monkeypatch.setattr(Writer, "compact", blocked)
    lines = [f"step {step} | loss 2.5" for step in range(1, COMPACT_EVERY_COMMITS + 11)]
    async with watch.session() as session:
        await watch.follow(session, lines[:-10], step=1)
        await eventually(begun.is_set)
        await watch.follow(session, lines[-10:], step=5)

        assert list(range(1, len(lines) + 1)) == watch.steps()
        assert [] == ended
        may_end.set()


async def test_log_without_rows_is_reported_after_the_first_step(watch, replay):
    """A log of an unknown format states the reason, and a first step that never ends is a stall."""
    async with watch.session() as session:
        replay.write(["loading the data"], seconds=1.0)
        await session.poll()
        waiting = session.statuses[0]
        replay.write(["compiling the model"], seconds=1900.0)
        await session.poll()

        assert "stalled" == session.statuses[0].condition
    assert "waiting" == waiting.condition
    assert "has an unknown format" in waiting.reason
    assert (
        "no first row for 31 min 41 s (clock of this machine), first step may be in progress"
        in watch.receiver.messages[0].body
    )


@pytest.mark.parametrize(("rotated", "fixture"), [("train.log.1", None), ("train.log-20250228", "remote")])
@pytest.mark.parametrize("end", [30, 60], ids=["complete", "with new rows"])
async def test_log_that_was_rotated_between_two_watches_is_complete(
    request, watch, replay, slow_lines, rotated, fixture, end
):
    log = str(replay.path) if fixture is None else request.getfixturevalue(fixture)
    async with watch.session(log) as session:
        await watch.follow(session, slow_lines[:30], step=30)
    replay.write(slow_lines[30:end])
    replay.path.rename(replay.path.with_name(rotated))
    replay.write(slow_lines[end:80])
    watch.settings = {"settle_seconds": 60.0}  # the log is known
    async with watch.session(log) as session:
        await session.poll()

    assert steps_in(slow_lines[:80]) == watch.steps()


async def test_pattern_and_loss_of_the_user_apply(watch, replay):
    watch.settings = {"pattern": (r"(?P<step>\d+) of \d+ >> (?P<first>[\d.]+)",), "loss": "first"}
    async with watch.session() as session:
        replay.write([f"{step} of 90 >> {3 - step / 100}" for step in range(10)])
        await session.poll()

    assert [{"n": 10}] == watch.query("SELECT count(*) AS n FROM scalars WHERE name = 'loss'")


# With a real sshd and the replayed log of a training that slows down and hangs.


@pytest.fixture
def remote(sshd: Sshd, replay: Replay) -> str:
    """Return the address of the replayed log on a machine with a clock that is ten minutes ahead."""
    replay.date_file = sshd.folder / "now"
    replay.ahead = 600.0
    replay.now -= 600.0
    replay.advance(0)
    return sshd.address(replay.path)


@pytest.mark.thorough
async def test_slow_then_stuck_training_is_reported_once(remote, replay, watch, slow_lines, tmp_path):
    """S0-11, S0-12, S0-14, S0-16: two messages with the last ten rows and the guide, and the rows of one import."""
    async with watch.session(remote) as session:
        await watch.follow(session, slow_lines[:200], step=40)
        before = watch.receiver.titles
        await watch.follow(session, slow_lines[200:], step=37)
        for _ in range(4):
            replay.advance(30.0)
            await session.poll()
    slow, stuck = watch.receiver.messages

    assert [] == before
    reason = "the last step took 5.58 s, 2.41 times the median of 2.32 s"
    assert f"[warning] r: RunSlow, {remote}, step 1125: {reason}" == slow.title
    reason = "no row for 60 s (date over SSH), expected every 6 s"
    assert f"[critical] r: RunStalled, {remote}, step 1160: {reason}" == stuck.title
    assert "date over SSH" in stuck.body
    assert 10 == sum(line.startswith("  step 11") for line in stuck.body.splitlines())
    course = "in a normal training: rises during warm-up, then follows its schedule"
    assert f"learning_rate: 0.0003 to 0.0003; {course}" in stuck.body
    assert watch.rows() == imported_rows(tmp_path / "once", replay.path)


async def test_cut_connection_is_opened_again(sshd, remote, replay, watch, slow_lines, tmp_path):
    async with watch.session(remote) as session:
        await watch.follow(session, slow_lines[:60], step=30)
        sshd.cut_connections()
        replay.write(slow_lines[60:90])
        await session.poll()
        await session.poll()

        assert session.statuses[0].unreadable is None
    assert [] == watch.receiver.titles
    assert watch.rows() == imported_rows(tmp_path / "once", replay.path)


async def test_unreachable_host_is_reported_once_and_its_return(sshd, remote, replay, watch, slow_lines):
    """S0-05: the command continues, reports that it cannot see the training, and reports when it can."""
    replay.write(slow_lines[:60])
    async with watch.session(remote) as session:
        await session.poll()
        sshd.stop()
        for begin in range(60, 180, 30):
            replay.write(slow_lines[begin : begin + 30])
            await session.poll()
        during = watch.receiver.titles
        reason = session.statuses[0].unreadable
        sshd.start()
        await session.poll()

    assert 1 == len(during)
    assert during[0].startswith(f"[warning] r: LogUnreadable, {remote}: ")
    assert "[resolved] r: LogUnreadable, the log can be read again" == watch.receiver.titles[-1]
    assert 2 == len(watch.receiver.titles)
    assert reason is not None
    assert "onnect" in reason


async def test_changed_host_key_is_refused_and_reported(sshd, remote, replay, watch, slow_lines, tmp_path):
    replay.write(slow_lines[:30])
    async with watch.session(remote) as session:
        await session.poll()
        sshd.stop()
        sshd.new_host_key()
        sshd.start()
        replay.write(slow_lines[30:60])
        for _ in range(3):  # the first poll finds the closed connection
            replay.advance(10.0)
            await session.poll()
        refused = session.statuses[0]
        trust(sshd, tmp_path / "home")
        await session.poll()

        assert session.statuses[0].unreadable is None
    assert refused.unreadable is not None
    assert "has CHANGED" in refused.unreadable
    assert watch.receiver.titles[0].startswith(f"[critical] r: LogUnreadable, {remote}: ")
    assert "has CHANGED" in watch.receiver.titles[0]


@pytest.mark.parametrize("config", ["", "  UserKnownHostsFile none\n"])
async def test_unknown_host_key_names_the_remedy(sshd, remote, watch, replay, tmp_path, config):
    """`UserKnownHostsFile none` means that no host is known, not that every host is accepted."""
    (tmp_path / "home/.ssh/known_hosts").unlink()
    with (tmp_path / "home/.ssh/config").open("a") as file:
        file.write(config)
    replay.write([])
    async with watch.session(remote) as session:
        await session.poll()

        assert "the key of the host is unknown: connect once with `ssh" in (session.statuses[0].unreadable or "")


async def test_host_alias_and_jump_host_of_the_ssh_configuration(sshd, remote, replay, watch, slow_lines, tmp_path):
    with (tmp_path / "home/.ssh/config").open("a") as config:
        config.write(f"Host node7\n  HostName 127.0.0.1\n  Port {sshd.port}\n  ProxyJump 127.0.0.1:{sshd.port}\n")
    replay.write(slow_lines[:60])
    async with watch.session(f"ssh://node7{replay.path}") as session:
        await session.poll()

        assert session.statuses[0].step is not None


async def test_refused_key_is_reported(sshd, remote, replay, watch, tmp_path):
    keygen(tmp_path / "other_key")
    config = tmp_path / "home/.ssh/config"
    config.write_text(config.read_text().replace(f"{sshd.folder}/user_key", f"{tmp_path}/other_key"))
    replay.write([])
    async with watch.session(remote) as session:
        await session.poll()

        assert "accepted neither a key nor a password" in (session.statuses[0].unreadable or "")


async def test_missing_log_is_reported_with_its_path(sshd, remote, replay, watch):
    async with watch.session(remote) as session:
        await session.poll()

        assert f"{replay.path} on 127.0.0.1" in (session.statuses[0].unreadable or "")
        with pytest.raises(LogUnreadableError, match="No such file"):
            await session.watchers[0].poll()


async def test_clock_without_commands_is_that_of_the_growing_log(sshd, remote, replay, watch, slow_lines):
    """If only SFTP is allowed, `date` cannot run; the message states the source of the clock."""
    sshd.restart("ForceCommand internal-sftp\n")
    async with watch.session(remote) as session:
        await watch.follow(session, slow_lines[:90], step=30)
        assert "training" == session.statuses[0].condition
        replay.advance(120.0)
        await session.poll()

        assert "stalled" == session.statuses[0].condition
    reason = "no row for 120 s (time of the last change of the growing log), expected every 2.3"
    assert reason in watch.receiver.messages[0].body


def compress(path):
    path.with_name(f"{path.name}.1.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


@pytest.mark.parametrize(
    ("rotate", "suffix"),
    [(lambda path: path.rename(path.with_name("train.log.1")), ".1"), (compress, ".1.gz")],
    ids=["renamed", "compressed"],
)
@pytest.mark.parametrize("is_remote", [False, True])
async def test_rotated_log_loses_no_row(request, replay, watch, slow_lines, caplog, is_remote, rotate, suffix):
    """The rest of the rotated part is read before the new log."""
    log = request.getfixturevalue("remote") if is_remote else str(replay.path)
    async with watch.session(log) as session:
        await watch.follow(session, slow_lines[:60], step=30)
        replay.write(slow_lines[60:80])
        rotate(replay.path)
        await watch.follow(session, slow_lines[80:120], step=20)

    older = f"train.log{suffix}" if is_remote else f"{replay.path}{suffix}"
    assert steps_in(slow_lines[:120]) == watch.steps()
    assert [f"{log}: the log was truncated; its older part is {older}"] == caplog.messages


async def test_restart_in_a_truncated_log_is_another_attempt(remote, replay, watch, slow_lines, caplog):
    async with watch.session(remote) as session:
        await watch.follow(session, slow_lines[:60], step=30)
        replay.path.write_text("")
        replay.write([later(line, 300.0) for line in slow_lines[:20]])
        await session.poll()

        assert 920 == session.statuses[0].step
    assert "truncated" in caplog.messages[0]
    assert [0, 1] == [row["attempt"] for row in watch.query("SELECT DISTINCT attempt FROM scalars ORDER BY 1")]
