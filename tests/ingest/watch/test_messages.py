"""Messages about followed logs by mail and Feishu, logins by password and agent, and [[watch]] of the service."""

from __future__ import annotations

import email
import email.policy
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import asyncssh
import pytest
from aiosmtpd.controller import Controller
from apprise.plugins.feishu import NotifyFeishu
from tests.ingest.conftest import running_service
from tests.ingest.watch.conftest import Sshd, imported_rows

from rankscope_ingest.notify.notifiers import make_notifiers
from rankscope_ingest.watch.address import LogAddress
from rankscope_ingest.watch.ssh import SshHosts


class Postbox:
    """An SMTP server that keeps the received mails."""

    def __init__(self) -> None:
        self.mails: list[email.message.EmailMessage] = []

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802 - aiosmtpd's name
        self.mails.append(email.message_from_bytes(envelope.content, policy=email.policy.default))
        return "250 taken"


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

    hosts = SshHosts(ask=ask, now=lambda: 0.0)
    address = LogAddress.parse(f"ssh://me@127.0.0.1:{port}{tmp_path}/train.log")
    file = hosts.file(address, known_hosts=str(known), timeout_seconds=20.0)
    first = await file.read(0, 6)
    await hosts.close()
    again = await file.read(0, 6)
    await hosts.close()
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
