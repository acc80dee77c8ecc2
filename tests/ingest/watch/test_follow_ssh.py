"""Logs that are followed over SSH, with a real sshd and the replayed log of a training that slows down and hangs."""

from __future__ import annotations

import contextlib
import shutil

import pytest
from tests.ingest.watch.conftest import Replay, Sshd, imported_rows, keygen, later, steps_in, trust

from rankscope_ingest.watch.address import FOLDER
from rankscope_ingest.watch.files import LogUnreadableError


@pytest.fixture
def remote(sshd: Sshd, replay: Replay) -> str:
    """Return the address of the replayed log on a machine whose clock is ten minutes ahead."""
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
    assert f"[warning] r: RunSlow, {remote}, step 1125" == slow.title
    reason = "no row for 63 s (date over SSH), expected every 5.55 s"
    assert f"[critical] r: RunStalled, {remote}, step 1160: {reason}" == stuck.title
    assert "date over SSH" in stuck.body
    assert 10 == sum(line.startswith("  step 11") for line in stuck.body.splitlines())
    assert "learning_rate: 0.0003 to 0.0003; rises during warm-up, then follows its schedule" in stuck.body
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


async def test_rotated_log_loses_no_row(remote, replay, watch, slow_lines, tmp_path, caplog):
    """The rest of the rotated part is read before the new log."""
    async with watch.session(remote) as session:
        await watch.follow(session, slow_lines[:60], step=30)
        replay.write(slow_lines[60:80])
        replay.path.rename(replay.path.with_name("train.log.1"))
        replay.write(slow_lines[80:120])
        await session.poll()

    assert steps_in(slow_lines[:120]) == watch.steps()
    assert "its older part is train.log.1" in caplog.messages[0]


async def test_restart_in_a_truncated_log_is_another_attempt(remote, replay, watch, slow_lines, caplog):
    async with watch.session(remote) as session:
        await watch.follow(session, slow_lines[:60], step=30)
        replay.path.write_text("")
        replay.write([later(line, 300.0) for line in slow_lines[:20]])
        await session.poll()

        assert 920 == session.statuses[0].step
    assert "truncated" in caplog.messages[0]
    assert [0, 1] == [row["attempt"] for row in watch.query("SELECT DISTINCT attempt FROM scalars ORDER BY 1")]


class KilledError(Exception):
    """A process was killed: nothing runs at its end."""


@pytest.mark.thorough
async def test_restart_of_watch_repeats_no_row_and_no_message(remote, replay, watch, slow_lines, tmp_path):
    """Position and state are in the store. The copy of the log can be deleted: it is read again."""
    for begin in range(0, len(slow_lines), 70):
        with contextlib.suppress(KilledError):
            async with watch.session(remote) as session:
                replay.write(slow_lines[begin : begin + 70])
                await session.poll()
                raise KilledError
        if begin == 70:
            shutil.rmtree(watch.folder / FOLDER)
    for _ in range(2):
        async with watch.session(remote) as session:
            replay.advance(100.0)
            await session.poll()

    assert ["RunSlow", "RunStalled"] == [title.split()[2].rstrip(",") for title in watch.receiver.titles]
    assert watch.rows() == imported_rows(tmp_path / "once", replay.path)
