"""Decisions about a training without a log, firings of rules, and messages about followed logs."""

import datetime as dt
import json
import math
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import asyncssh
import pyarrow as pa
import pytest
from aiosmtpd.controller import Controller
from apprise.plugins.feishu import NotifyFeishu
from tests.end_to_end.alerting import Postbox
from tests.ingest.conftest import running_service
from tests.ingest.watch.conftest import Replay, Sshd, Watch, imported_rows

from rankscope_ingest.base.config import WatchSection
from rankscope_ingest.notify.notifiers import make_notifiers
from rankscope_ingest.watch.files import LogAddress, MachineClock
from rankscope_ingest.watch.judge import Condition, LogRows, judge
from rankscope_ingest.watch.ssh import RemoteFile, SshHost
from rankscope_storage.connection import connect
from rankscope_view.data.incidents import incidents, sentence_of

LIMITS = WatchSection(log="train.log")
START = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)


def rows_of(seconds: list[float], *, every: int = 1, evaluations: tuple[int, ...] = (), times: bool = True) -> LogRows:
    """Return rows of which each has one step time; a row contains `every` steps."""
    scalars, events, now = [], [], START
    for number, value in enumerate(seconds):
        step = (number + 1) * every
        now += dt.timedelta(seconds=value * every)
        common = {"incarnation": "i", "seq": step, "attempt": 0, "rank": None, "step": step}
        common["ts"] = now if times else None
        scalars += [common | {"name": "step_seconds", "value": value}, common | {"name": "loss", "value": 1.0}]
        if step in evaluations:
            event = {"type": "evaluation", "severity": "info", "op": None, "message": "", "details": None}
            events.append(common | event | {"seq": step})
    rows = LogRows()
    rows.add("i", pa.Table.from_pylist(scalars), pa.Table.from_pylist(events), 0)
    return rows


def condition(rows: LogRows, silence: float, **facts: object) -> Condition:
    return judge(rows, LIMITS, silence=silence, quiet=silence, clock="", **facts).condition


@pytest.mark.parametrize("seconds", [0.5, 0.7])
def test_pace_of_rows_whose_times_are_whole_seconds(seconds):
    texts = [START + dt.timedelta(seconds=int(n * seconds)) for n in range(60)]
    columns = {"incarnation": "i", "attempt": 0, "rank": None, "name": "loss", "value": 1.0}
    rows = LogRows()
    scalars = [columns | {"seq": n, "step": n, "ts": at} for n, at in enumerate(texts)]
    rows.add("i", pa.Table.from_pylist(scalars), pa.table({}), 0)

    assert seconds == pytest.approx(rows.expected_seconds, rel=0.03)


@pytest.mark.parametrize(("name", "last"), [("entropy", 32), ("eval_loss", 30)])
def test_row_of_a_further_step_without_a_loss_is_a_row(name, last):
    rows = rows_of([1.0] * 30)
    own = {"incarnation": "i", "attempt": 0, "rank": None, "name": name, "value": 1.0, "ts": None}
    rows.add("i", pa.Table.from_pylist([own | {"seq": n, "step": n} for n in (31, 32)]), pa.table({}), 0)

    assert last == rows.last.step


def test_short_steps_whose_times_are_whole_seconds_are_not_slow():
    assert Condition.TRAINING == condition(rows_of([*[0.0] * 30, 1.0]), 1.0)


@pytest.mark.parametrize(("silence", "text"), [(63.0, "63 s"), (7500.0, "2 h 5 min"), (31937537.0, "369 d 15 h")])
def test_long_time_without_a_row_has_large_units(silence, text):
    found = judge(rows_of([1.0] * 30), LIMITS, silence=silence, quiet=silence, clock="clock")

    assert f"no row for {text} (clock), expected every 1 s" == found.reason


@pytest.mark.parametrize(
    ("seconds", "every", "silence", "expected"),
    [
        ([1.0] * 30, 1, 59.0, Condition.TRAINING),  # below the shortest time
        ([1.0] * 30, 1, 61.0, Condition.STALLED),
        ([40.0] * 30, 1, 119.0, Condition.TRAINING),  # 3 times the time between rows
        ([40.0] * 30, 1, 121.0, Condition.STALLED),
        ([4.0] * 30, 100, 1199.0, Condition.TRAINING),  # a row contains 100 steps
        ([4.0] * 30, 100, 1201.0, Condition.STALLED),
        ([900.0], 1, 1799.0, Condition.TRAINING),  # the first step
        ([], 1, 1801.0, Condition.STALLED),
        ([], 1, 1799.0, Condition.WAITING),
    ],
)
def test_stall_is_judged_by_the_usual_time_between_rows(seconds, every, silence, expected):
    assert expected == condition(rows_of(seconds, every=every), silence)
    assert expected == condition(rows_of(seconds, every=every, times=False), silence)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([60.0, *[1.0] * 30, 2.1], Condition.SLOW),  # the first step is no part of the median
        ([60.0, *[1.0] * 30, 1.9], Condition.TRAINING),
        ([*[5.0] * 10, *[1.0] * 4, 9.0], Condition.SLOW),
        ([1.0, 1.0, 9.0], Condition.TRAINING),  # too few rows for a median
    ],
)
def test_slow_step_is_compared_with_the_median(seconds, expected):
    assert expected == condition(rows_of(seconds), 1.0)


def test_long_slow_phase_does_not_become_normal():
    """The median before the first slow step remains the baseline."""
    rows = rows_of([*[1.0] * 30, *[3.0] * 300])

    assert Condition.TRAINING == condition(rows, 1.0)
    assert Condition.SLOW == condition(rows, 1.0, slow_since=1.0)


def test_slow_steps_that_are_not_over_are_described_by_the_last_slow_one():
    rows = rows_of([*[1.0] * 30, 5.0, 1.0, 1.0])
    verdict = judge(rows, LIMITS, silence=1.0, quiet=1.0, clock="", slow_since=1.0)

    assert "a step 2 rows ago took 5 s, 5 times the median of 1 s" == verdict.reason


def test_due_evaluation_extends_the_time_without_a_row():
    before = rows_of([1.0] * 29, evaluations=(10, 20))
    due = rows_of([1.0] * 30, evaluations=(10, 20))

    assert Condition.STALLED == condition(before, 100.0)
    assert Condition.TRAINING == condition(due, 100.0)
    assert Condition.STALLED == condition(due, 1801.0)


@pytest.mark.parametrize("zone", [0, 28_800, -18_000])
@pytest.mark.parametrize("writes_utc", [True, False])
def test_time_of_a_row_is_read_in_the_zone_that_fits(zone, writes_utc):
    clock = MachineClock(source="date over SSH", zone_seconds=zone)
    moment = 1_000_000.0
    written = moment if writes_utc or not zone else moment + zone

    assert moment == clock.moment(written, moment + 5.0)


# Firings of rules in a followed log: one line, one message and one incident for each, until their cause is gone.

HEALTHY: Mapping[str, float] = {"loss": 3.16, "lr": 1e-4, "step_time_s": 1.0}


def lines(first: int, last: int, **faults: Mapping[int, float]) -> list[str]:
    """Return the lines of steps with a noise of about 1 %; `faults` has other values of quantities, by step."""
    found = []
    for step in range(first, last + 1):
        row = HEALTHY | {"loss": HEALTHY["loss"] * (1 + 0.01 * (step * 7 % 5 - 2))}
        found.append({"step": step, **row, **{name: at[step] for name, at in faults.items() if step in at}})
    return [json.dumps(row) for row in found]


async def write(watch: Watch, replay: Replay, *parts: list[str]) -> None:
    async with watch.session() as session:
        for part in parts:
            replay.write(part, seconds=10.0)
            await session.poll()


def listed(watch: Watch) -> list[tuple[str, str]]:
    """Return the state and the sentence of each incident, as `rankscope incidents` lists them."""
    with connect(watch.folder) as connection:
        found = incidents(connection, ["r"]).get("r", ())
    return [("open" if one.is_open else one.states[-1][1], sentence_of(one)) for one in found]


FAULTS: Mapping[str, tuple[Mapping[str, Mapping[int, float]], str, str]] = {
    "AnomalyNan in loss": ({"loss": {40: math.nan}}, "critical", "loss became NaN"),
    "LossSpike in loss": ({"loss": {40: 7.66}}, "warning", "loss 7.66, 2.4 times its median"),
    "LearningRateJump in learning_rate": (
        {"lr": dict.fromkeys(range(40, 91), 1e-3)},
        "warning",
        "learning rate 0.001, 10 times its previous maximum",
    ),
    "SlowSteps in step_seconds": (
        {"step_time_s": {38: 3.1, 39: 3.1, 40: 3.1}},
        "warning",
        "step time 3.1 s, 3.1 times its median",
    ),
}


@pytest.mark.usual(2)
@pytest.mark.parametrize("rule", FAULTS)
async def test_firing_is_printed_sent_and_listed_once(watch, replay, caplog, rule):
    faults, severity, wrong = FAULTS[rule]
    await write(watch, replay, lines(1, 36), lines(37, 45, **faults), lines(46, 50, **faults))
    during = listed(watch)
    await write(watch, replay, lines(51, 90, **faults))
    (message,) = watch.receiver.messages

    assert f"[{severity}] r: {rule}, {replay.path}, step 40: {wrong}" == message.title
    assert "details: rankscope anomalies r --store" in message.body
    assert "  step 40  " in message.body
    assert [f"r: {wrong} at step 40"] == [record.getMessage() for record in caplog.records]
    assert [f"{wrong[0].upper()}{wrong[1:]} at step 40"] == [sentence for _, sentence in during]
    assert [("resolved", during[0][1])] == listed(watch)


async def test_lasting_nan_is_open_and_reported_once(watch, replay):
    nan = dict.fromkeys(range(40, 121), math.nan)
    await write(watch, replay, lines(1, 60, loss=nan), lines(61, 90, loss=nan))
    await write(watch, replay, lines(91, 120, loss=nan))
    (message,) = watch.receiver.messages

    assert "loss: 3.16 to 3.1916, NaN or infinite in 1 of 10 rows; in a normal training: falls" in message.body
    assert [("open", "Loss became NaN at step 40")] == listed(watch)


@pytest.mark.parametrize("before", [100, 0])
async def test_nan_in_thousands_of_rows_of_one_poll_is_reported_at_its_step(watch, replay, before):
    """Only the last 5,000 rows are kept, for the pace of the training."""
    nan = dict.fromkeys(range(200, 5601), math.nan)
    await write(watch, replay, *filter(None, [lines(1, before)]), lines(before + 1, 5700, loss=nan))
    (message,) = watch.receiver.messages

    assert "step 200: loss became NaN" in message.title
    assert [("resolved", "Loss became NaN at step 200")] == listed(watch)


async def test_training_that_finished_with_nan_has_its_severity(watch, replay):
    done = {**HEALTHY, "loss": math.nan, "step": 60, "total_steps": 60}
    rows = [*lines(1, 59, loss=dict.fromkeys(range(40, 60), math.nan)), json.dumps(done)]
    await write(watch, replay, rows[:30], rows[30:])
    title = next(title for title in watch.receiver.titles if "RunFinished" in title)
    reason = "finished with 1 open incident: loss became NaN at step 40"

    assert f"[critical] r: RunFinished, {replay.path}, step 60: {reason}" == title
    assert ("finished", reason) == (watch.changes[-1].condition, watch.changes[-1].reason)
    assert not watch.changes[-1].is_normal


async def test_spike_that_rises_to_the_end_has_its_largest_value(watch, replay):
    rising = {step: 7.66 * 1.1 ** (step - 40) for step in range(40, 60)}
    done = {**HEALTHY, "loss": 60.0, "step": 60, "total_steps": 60}
    rows = [*lines(1, 59, loss=rising), json.dumps(done)]
    await write(watch, replay, rows[:45], rows[45:])
    shown = "loss up to 60, 19 times its median, since step 40"

    assert f"finished with 1 open incident: {shown}" == watch.changes[-1].reason
    assert [("open", f"L{shown[1:]}")] == listed(watch)


async def test_rows_of_every_hundredth_step_are_neighbours(watch, replay):
    """The log has a row for every 100 steps, of which the last two are NaN."""
    rows = [json.dumps({"step": 100 * n, "loss": math.nan if n > 28 else 3.0 - n / 90}) for n in range(1, 31)]
    await write(watch, replay, rows[:25], rows[25:])
    (message,) = watch.receiver.messages

    assert "step 2900: loss became NaN" in message.title
    assert [("open", "Loss became NaN at step 2,900")] == listed(watch)


async def test_anomaly_of_an_attempt_is_open_until_a_later_one_passes_its_step(watch, replay):
    """The script is started again from step 20, in the same log."""
    nan = dict.fromkeys(range(40, 61), math.nan)
    async with watch.session() as session:
        replay.write(lines(1, 60, loss=nan), seconds=10.0)
        await session.poll()
        replay.write(lines(20, 38), seconds=10.0)
        await session.poll()
        await session._reporter.sent()
        before = listed(watch)
        replay.write(lines(39, 42), seconds=10.0)
        await session.poll()

    assert [("open", "Loss became NaN at step 40")] == before
    assert [("resolved", "Loss became NaN at step 40")] == listed(watch)
    assert [1] == [row["attempt"] for row in watch.query("SELECT attempt FROM runs")]
    assert 1 == len(watch.receiver.messages)


async def test_crash_and_restart_between_two_polls_are_printed_sent_and_listed(watch, replay, caplog):
    """The traceback is younger than `failed_after_seconds` when the script starts again from step 41."""
    crash = ["Traceback (most recent call last):", '  File "train.py", line 3', "RuntimeError: disk full"]
    await write(watch, replay, lines(1, 60), crash, lines(41, 50))
    failed = f"[critical] r: RunFailed, {replay.path}, step 60: exception: RuntimeError: disk full"

    assert [failed, "[resolved] r: RunFailed, training continues"] == watch.receiver.titles
    assert [
        "r: failed at step 60: exception: RuntimeError: disk full",
        "r: training was started again as attempt 1, step 41",
    ] == [record.getMessage() for record in caplog.records]
    assert [("resolved", "Exception: RuntimeError: disk full at step 60")] == listed(watch)
    assert ["failed", "stopped"] == [row["state"] for row in watch.query("FROM attempts ORDER BY attempt")]


async def test_same_anomaly_in_the_later_attempt_keeps_both_open(watch, replay):
    nan = dict.fromkeys(range(40, 61), math.nan)
    await write(watch, replay, lines(1, 60, loss=nan), lines(20, 60, loss=nan))

    assert [("open", "Loss became NaN at step 40")] * 2 == listed(watch)
    assert 2 == len(watch.receiver.messages)


async def test_slow_steps_at_the_end_of_the_log_are_one_message(watch, replay):
    slow = dict.fromkeys(range(38, 51), 3.1)
    await write(watch, replay, lines(1, 37), lines(38, 50, step_time_s=slow))
    (message,) = watch.receiver.messages

    assert message.title.endswith("step 50: the last step took 3.1 s, 3.1 times the median of 1 s")
    assert ("open", "The last step took 3.1 s, 3.1 times the median of 1 s at step 50") in listed(watch)


# Messages by mail and Feishu, logins by password and agent, and [[watch]] of the service.


@pytest.fixture
def postbox(free_port: int) -> Iterator[tuple[Postbox, str]]:
    box = Postbox()
    controller = Controller(box, hostname="127.0.0.1", port=free_port)
    controller.start()
    yield box, f"mailto://127.0.0.1:{free_port}?from=monitor@example.com&to=ops@example.com"
    controller.stop()


@pytest.fixture
def feishu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Return the messages that a robot of Feishu receives."""
    received: list[dict[str, Any]] = []

    class Robot(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"code": 0}')

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's signature
            """Do nothing instead of logging each request."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Robot)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(NotifyFeishu, "notify_url", f"http://127.0.0.1:{server.server_port}/hook/{{token}}/")
    yield received
    server.shutdown()
    server.server_close()


async def test_stall_is_sent_by_mail_and_feishu(watch, replay, slow_lines, postbox, feishu):
    """S0-01, S0-04, S0-14: the subject names state and step, the text has the last ten rows and the keyword."""
    box, url = postbox
    notifiers = make_notifiers([url, "feishu://0123456789abcdef"], timeout_seconds=20.0)
    async with watch.session(notifiers=notifiers) as session:
        await watch.follow(session, slow_lines[:40], step=40)
        replay.advance(300.0)
        await session.poll()
    (mail,) = box.mails
    (chat,) = feishu
    text = mail.get_body(("plain",)).get_content()

    reason = "no row for 300 s (clock of this machine), expected every 2.33 s"
    assert f"[critical] r: RunStalled, {replay.path}, step 940: {reason}" == mail["Subject"]
    assert 10 == sum("  step 9" in line for line in text.splitlines())
    assert "how to read the rows:" in text
    assert "monitor" in json.dumps(chat)
    assert "RunStalled" in json.dumps(chat)


class PasswordServer(asyncssh.SSHServer):
    """An SSH server that accepts one password and no key."""

    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, _username: str, password: str) -> bool:
        return password == "correct"


async def test_password_is_asked_for_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A real sshd needs an account with a password, so that the server of asyncssh is used."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = asyncssh.generate_private_key("ssh-ed25519")
    listener = await asyncssh.listen(
        "127.0.0.1", 0, server_factory=PasswordServer, server_host_keys=[key], sftp_factory=True
    )
    port = listener.get_port()
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{port} {key.export_public_key().decode()}")
    (tmp_path / "train.log").write_text("step 1 loss 2.5\n")
    asked: list[str] = []

    def ask(prompt: str) -> str:
        asked.append(prompt)
        return "correct"

    address = LogAddress.parse(f"ssh://me@127.0.0.1:{port}{tmp_path}/train.log")
    host = SshHost(address, str(known), 20.0, ask)
    file = RemoteFile(address, host)
    first = await file.read(0, 6)
    await host.close()
    again = await file.read(0, 6)
    await host.close()
    listener.close()
    await listener.wait_closed()

    assert b"step 1" == first == again
    assert [f"Password for me@127.0.0.1:{port}: "] == asked


@pytest.fixture
def agent(sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start an agent with the key of the user, which the SSH configuration does not name."""
    path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    while not path.exists():
        time.sleep(0.01)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    subprocess.run(["ssh-add", "-q", str(sshd.folder / "user_key")], check=True, capture_output=True)
    (tmp_path / "home/.ssh/config").write_text("")
    yield
    process.kill()
    process.wait()


@pytest.mark.usefixtures("agent")
async def test_key_of_the_agent_is_used(sshd, replay, watch, slow_lines):
    replay.write(slow_lines[:20])
    async with watch.session(sshd.address(replay.path)) as session:
        await session.poll()

        assert 920 == session.statuses[0].step


async def test_service_follows_the_logs_of_its_configuration(tmp_path: Path, slow_lines: list[str], eventually):
    """The rows are those of one import, and the page of the service shows no fault."""
    log = tmp_path / "train.log"
    log.write_text("".join(f"{line}\n" for line in slow_lines[:40]))
    os.utime(log, (1_740_759_937, 1_740_759_937))
    section = {"log": str(log), "run": "r", "poll_seconds": 0.05, "settle_seconds": 0.0}
    async with running_service(tmp_path / "store", watch=[section]) as service:
        await eventually(lambda: service.rows("SELECT 1 FROM events WHERE type = 'incident'"))
        _, health = await service.get("/healthz")

        assert "background tasks failed" not in health
    scalars = [row for row in imported_rows(tmp_path / "once", log) if len(row) == 9]

    assert len(scalars) == service.rows("SELECT count(*) AS n FROM scalars")[0]["n"]
    assert [{"state": "stopped"}] == service.rows("SELECT state FROM runs WHERE run = 'r'")


def test_copy_of_a_log_in_a_folder_with_a_long_name_can_be_written(tmp_path):
    """Each Chinese character takes nine bytes in the percent-encoded name of the folder."""
    copies = [LogAddress.parse(f"ssh://me@host/{'数据' * 30}{end}/train.log").copy_in(tmp_path) for end in "ab"]
    for copy in copies:
        copy.parent.mkdir(parents=True)
        copy.touch()

    assert 2 == len(set(copies))
    assert LogAddress.parse("ssh://h/data/a.log").copy_in(tmp_path) == tmp_path / "_watch" / "h" / "%2Fdata" / "a.log"
