"""Fixtures of the tests of followed logs: a real sshd on loopback, a clock that the test sets, and a log that grows."""

import contextlib
import datetime as dt
import getpass
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from rankscope_ingest.base.config import WatchSection
from rankscope_ingest.importers import find_importer, import_records
from rankscope_ingest.notify.announcer import Message, NotifyError
from rankscope_ingest.watch.watcher import Hooks, LogStatus, WatchSession, watching
from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect

SLOW_LOG = Path(__file__).parent / "data" / "slowdown_then_hang.log"
CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
Subsystem sftp internal-sftp
SetEnv PATH={folder}/bin:/usr/bin:/bin
"""
DATE = """\
#!/bin/sh
cat {folder}/now
"""


@dataclass(slots=True)
class Sshd:
    """A running sshd with its own host key; `config` has further lines of its configuration."""

    program: str
    folder: Path
    port: int
    config: str = ""
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        text = CONFIG.format(port=self.port, folder=self.folder) + self.config
        (self.folder / "sshd_config").write_text(text)
        log = (self.folder / "sshd.log").open("ab")
        command = [self.program, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        self.process = subprocess.Popen(command, stderr=log, start_new_session=True)
        for _ in range(200):
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.connect(("127.0.0.1", self.port))
                return
            time.sleep(0.02)
        pytest.fail((self.folder / "sshd.log").read_text())

    def stop(self) -> None:
        if self.process is None:
            return
        self.cut_connections()
        self.process.kill()
        self.process.wait()
        self.process = None

    def cut_connections(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()

    def restart(self, config: str = "") -> None:
        self.stop()
        self.config = config
        self.start()

    def new_host_key(self) -> None:
        for name in ("host_key", "host_key.pub"):
            (self.folder / name).unlink(missing_ok=True)
        keygen(self.folder / "host_key")

    def address(self, path: Path) -> str:
        return f"ssh://127.0.0.1:{self.port}{path}"


def keygen(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


@pytest.fixture(scope="module")
def sshd_of_module(tmp_path_factory: pytest.TempPathFactory, require_server: Callable[..., str]) -> Iterator[Sshd]:
    """Start one sshd for all tests of a module."""
    require_server("ssh-keygen", "openssh-client")
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") or require_server("sshd", "openssh-server")
    folder = tmp_path_factory.mktemp("sshd")
    with contextlib.suppress(OSError):  # of the Debian package, for a server that root starts
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    keygen(folder / "host_key")
    keygen(folder / "user_key")
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    (folder / "bin").mkdir()
    (folder / "bin/date").write_text(DATE.format(folder=folder))
    (folder / "bin/date").chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Sshd(program, folder, port)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def sshd(sshd_of_module: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    """Return the sshd, with a home folder in which its host key is known and the key of the user is configured."""
    server = sshd_of_module
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    trust(server, home)
    (home / ".ssh/config").write_text(
        f"Host *\n  User {getpass.getuser()}\n  IdentityFile {server.folder}/user_key\n  IdentitiesOnly yes\n"
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    yield server
    if server.config or server.process is None or server.process.poll() is not None:
        server.restart()


def trust(server: Sshd, home: Path) -> None:
    key = (server.folder / "host_key.pub").read_text().split()
    (home / ".ssh/known_hosts").write_text(f"[127.0.0.1]:{server.port} {key[0]} {key[1]}\n")


class Receiver:
    """A notifier that keeps its messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.label = "receiver"
        self.is_broken = False

    async def send(self, message: Message) -> None:
        if self.is_broken:
            raise NotifyError("receiver is broken")
        self.messages.append(message)

    @property
    def titles(self) -> list[str]:
        return [message.title for message in self.messages]


def time_of(line: str) -> float | None:
    """Return the time in a line of the log, which is in UTC, in seconds since 1970."""
    found = re.search(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\]", line)
    return dt.datetime.strptime(f"{found[1]}+0000", "%Y-%m-%d %H:%M:%S%z").timestamp() if found else None


def later(line: str, seconds: float) -> str:
    moment = time_of(line)
    if moment is None:
        return line
    shifted = dt.datetime.fromtimestamp(moment + seconds, dt.UTC)
    return re.sub(r"\[\d{4}-[^\]]*\]", f"[{shifted:%Y-%m-%d %H:%M:%S}]", line)


@dataclass(slots=True)
class Replay:
    """A log that a test writes line by line, at the times that the test sets."""

    path: Path
    now: float
    zone: str = "+0000"
    ahead: float = 0.0  # Seconds by which the clock of the machine of the log is ahead of that of this machine
    date_file: Path | None = None

    def clock(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
        if self.date_file is not None:
            self.date_file.write_text(f"{int(self.now + self.ahead)} {self.zone}\n")

    def write(self, lines: Sequence[str], *, seconds: float = 0.0) -> None:
        """Append lines at the time of the last one of them, or `seconds` from now on."""
        times = [moment for line in lines if (moment := time_of(line)) is not None]
        self.advance(max(times[-1] - self.ahead - self.now, 0.0) if times else seconds)
        text = "".join(f"{line}\n" for line in lines)
        with self.path.open("a") as log:
            log.write(text)
        self.touch()

    def touch(self) -> None:
        os.utime(self.path, (self.now + self.ahead, self.now + self.ahead))


@pytest.fixture
def replay(tmp_path: Path) -> Replay:
    (tmp_path / "host").mkdir()
    return Replay(tmp_path / "host/train.log", now=1_740_759_937.0)


@dataclass(slots=True)
class Watch:
    """A store, and sessions that follow logs into it."""

    folder: Path
    replay: Replay
    receiver: Receiver = field(default_factory=Receiver)
    changes: list[LogStatus] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    finish_seconds: float = 10.0

    @contextlib.asynccontextmanager
    async def session(self, *logs: str | tuple[str, str], notifiers: Any = None) -> AsyncIterator[WatchSession]:
        pairs = [log if isinstance(log, tuple) else (log, "r") for log in logs or [str(self.replay.path)]]
        settings = {"settle_seconds": 0.0, "store_seconds": 1e6} | self.settings
        sections = [WatchSection(log=log, run=run, **settings) for log, run in pairs]
        hooks = Hooks(on_change=self.changes.append, now=self.replay.clock)
        store = Store.open(self.folder, create=True)
        listed = [self.receiver] if notifiers is None else notifiers
        with store.claim(owner="test") as writer:
            async with watching(
                sections, writer, self.folder, listed, hooks=hooks, finish_seconds=self.finish_seconds
            ) as session:
                yield session

    async def follow(self, session: WatchSession, lines: Sequence[str], *, step: int) -> None:
        """Write `lines` in parts of `step` lines, each at its time, and poll after each part."""
        for begin in range(0, len(lines), step):
            self.replay.write(lines[begin : begin + step])
            await session.poll()

    def query(self, query: str) -> list[dict[str, Any]]:
        with connect(self.folder) as connection:
            return connection.query(query).to_pylist()

    def steps(self) -> list[int]:
        return [row["step"] for row in self.query("SELECT step FROM scalars WHERE name = 'loss' ORDER BY step")]

    def rows(self) -> list[tuple[Any, ...]]:
        """Return all scalars and all events of the log, in a comparable form."""
        return stored_rows(self.folder)


def stored_rows(folder: Path) -> list[tuple[Any, ...]]:
    with connect(folder) as connection:
        scalars = connection.query(
            "SELECT seq, step, attempt, ts, rank, name, value, unit, labels FROM scalars ORDER BY ALL"
        )
        events = connection.query(
            "SELECT seq, step, attempt, ts, type, op, message, details FROM events WHERE seq IS NOT NULL ORDER BY ALL"
        )
    return [tuple(row.values()) for row in (*scalars.to_pylist(), *events.to_pylist())]


def steps_in(lines: Sequence[str]) -> list[int]:
    return list(range(901, 901 + sum("] iteration" in line for line in lines)))


def imported_rows(folder: Path, log: Path) -> list[tuple[Any, ...]]:
    with Store.open(folder, create=True).claim(owner="test") as writer:
        import_records(log, writer, find_importer(log), run="r", known=[])
    return stored_rows(folder)


@pytest.fixture
def watch(tmp_path: Path, replay: Replay) -> Watch:
    return Watch(tmp_path / "store", replay)


@pytest.fixture(scope="session")
def slow_lines() -> list[str]:
    """Return the lines of a log whose steps become slow from step 1100 on, and which ends at step 1160."""
    return SLOW_LOG.read_text().splitlines()
