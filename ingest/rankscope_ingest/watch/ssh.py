"""Read logs of other machines over SSH and SFTP with asyncssh.

Keys, agent, jump hosts and further settings are those of `~/.ssh/config`. The key of the host is always checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import functools
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from rankscope_ingest.base.errors import ConfigError
from rankscope_ingest.watch.files import FileState, LogAddress, LogUnreadableError, MachineClock, rotated_names

if TYPE_CHECKING:
    import asyncssh

KEEPALIVE_SECONDS: Final = 15.0
LOGIN_SECONDS: Final = 120.0
DATE_SECONDS: Final = 5.0
CLOCK_SECONDS: Final = 600.0
"""Interval in seconds at which the clock of another machine is read again."""
_DATE: Final = "date '+%s %z'"

Ask = Callable[[str], str | None]
"""A function that asks the user for a secret without echo; it returns None if no secret was entered."""


class UntrustedHostError(LogUnreadableError):
    """The key of the host is not the one in the file of known hosts, or is missing there."""


def load_asyncssh() -> ModuleType:
    """Return the module asyncssh. Raises ConfigError, which names the extra, if it is not installed."""
    try:
        import asyncssh  # noqa: PLC0415 - of an extra
    except ImportError as error:
        raise ConfigError(
            "following a log over SSH needs asyncssh: run pip install '.[ssh]' in a checkout of Rankscope"
        ) from error
    return asyncssh


@dataclass(slots=True)
class SshHost:
    """The SSH connection to one machine, which all logs of this machine share. It is opened when it is needed.

    `ask` is called if the server accepts no key. `now` returns the time of this machine in seconds since 1970.
    """

    address: LogAddress
    known_hosts: str | None
    timeout_seconds: float
    ask: Ask | None
    now: Callable[[], float] = time.time
    _ssh: Any = field(default_factory=load_asyncssh)
    _password: str | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _connection: asyncssh.SSHClientConnection | None = None
    _sftp: asyncssh.SFTPClient | None = None
    _clock: MachineClock | None = None
    _clock_read_at: float = -math.inf

    @contextlib.asynccontextmanager
    async def sftp(self, path: PurePosixPath) -> AsyncIterator[asyncssh.SFTPClient]:
        """Yield an SFTP client. Errors become LogUnreadableError with `path`, and the next call connects again."""
        place = f"{path} on {self.address.machine}"
        try:
            # A user needs time to enter a password.
            async with asyncio.timeout(self.timeout_seconds if self.ask is None else LOGIN_SECONDS):
                client = await self._client()
            async with asyncio.timeout(self.timeout_seconds):
                yield client
        except (self._ssh.SFTPNoSuchFile, self._ssh.SFTPPermissionDenied, self._ssh.SFTPFailure) as error:
            raise LogUnreadableError(f"{place}: {error.reason}") from error
        except self._ssh.HostKeyNotVerifiable as error:
            await self.close()
            raise UntrustedHostError(await self._untrusted()) from error
        except self._ssh.PermissionDenied as error:
            await self.close()
            self._password = None
            raise LogUnreadableError(
                f"{place}: the server accepted neither a key nor a password: check that "
                f"`ssh {self.address.machine}` connects, and the keys in ~/.ssh/config"
            ) from error
        except TimeoutError as error:
            await self.close()
            raise LogUnreadableError(f"{place}: timed out after {self.timeout_seconds:g} s") from error
        except (self._ssh.Error, OSError, ValueError) as error:
            await self.close()
            text = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise LogUnreadableError(f"{place}: {text}") from error

    async def _client(self) -> asyncssh.SFTPClient:
        async with self._turn:
            if self._connection is None or self._connection.is_closed():
                self._sftp, self._clock_read_at = None, -math.inf
                self._connection = await self._connect()
            if self._sftp is None:
                self._sftp = await self._connection.start_sftp_client()
            return self._sftp

    async def _connect(self) -> asyncssh.SSHClientConnection:
        connection: asyncssh.SSHClientConnection = await self._ssh.connect(
            **self._target(), options=await self._options()
        )
        return connection

    async def _options(self) -> Any:
        own: dict[str, Any] = {} if self.known_hosts is None else {"known_hosts": self.known_hosts}
        own |= {} if self.ask is None else {"password": self._secret}
        construct = functools.partial(
            self._ssh.SSHClientConnectionOptions.construct,
            config=(),
            keepalive_interval=KEEPALIVE_SECONDS,
            **self._target(),
        )
        options = await construct(**own)
        if options.known_hosts is None:  # `UserKnownHostsFile none`: asyncssh would accept every key
            options = await construct(**own | {"known_hosts": _own_known_hosts()})
        return options

    def _target(self) -> dict[str, Any]:
        return {"host": self.address.host, "port": self.address.port or (), "username": self.address.user or ()}

    async def _secret(self) -> str | None:
        """Return the password of the user: the last accepted one, or a new one that the user enters."""
        if self._password is None and self.ask is not None:
            self._password = await asyncio.to_thread(self.ask, f"Password for {self.address.machine}: ")
        return self._password

    async def _untrusted(self) -> str:
        """Return a message that states whether the key of the host is unknown or has changed."""
        machine = self.address.machine
        with contextlib.suppress(Exception):  # the message without this detail is correct, too
            options = await self._options()
            files = options.known_hosts or _own_known_hosts()
            port = options.port if options.port != self._ssh.connection.DEFAULT_PORT else None
            if any(self._ssh.match_known_hosts(files, options.host, "", port)[:3]):
                return (
                    f"{machine}: the key of the host has CHANGED. Another machine may be answering: nothing was read. "
                    f"If the change is intended, run `ssh-keygen -R {_known_name(options.host, port)}`, then connect "
                    "once with ssh and compare the fingerprint"
                )
        return (
            f"{machine}: the key of the host is unknown: connect once with `ssh {machine}` and compare the fingerprint"
        )

    async def clock(self) -> MachineClock | None:
        """Return the clock of the machine, read by `date` at most every 10 minutes.

        Return None if the server executes no commands.
        """
        now = time.monotonic()
        if now - self._clock_read_at >= CLOCK_SECONDS:
            self._clock, self._clock_read_at = await self._date(), now
        return self._clock

    async def _date(self) -> MachineClock | None:
        if self._connection is None:
            return None
        before = self.now()
        try:
            async with asyncio.timeout(DATE_SECONDS):
                done = await self._connection.run(_DATE, stdin=self._ssh.DEVNULL)
            seconds, zone = str(done.stdout).split()
            midnight = dt.datetime.strptime(f"1970 {zone}", "%Y %z").timestamp()
            # `date` cuts the fraction off: on average, half a second.
            offset = int(seconds) + 0.5 - (before + self.now()) / 2
            return MachineClock(offset_seconds=offset, source="date over SSH", zone_seconds=-int(midnight))
        except (self._ssh.Error, OSError, ValueError, TimeoutError):
            return None

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection, self._sftp = self._connection, None, None
        if connection is not None:
            connection.abort()
            with contextlib.suppress(Exception):  # the connection may be broken
                await connection.wait_closed()


def _own_known_hosts() -> str | bytes:
    """Return the path of the user's file of known hosts, or an empty content if there is no such file."""
    path = Path("~/.ssh/known_hosts").expanduser()
    return str(path) if path.is_file() else b""


def _known_name(host: str, port: int | None) -> str:
    return host if port is None else f"'[{host}]:{port}'"


class RemoteFile:
    """A log on another machine, which is read over SFTP."""

    def __init__(self, address: LogAddress, host: SshHost) -> None:
        self.address = address
        self._host = host

    def _path(self, name: str | None) -> PurePosixPath:
        path = PurePosixPath(self.address.path)
        return path if name is None else path.with_name(name)

    async def state(self, name: str | None = None) -> FileState:
        """Return the state of the log, or of the file `name` in the same folder."""
        path = self._path(name)
        async with self._host.sftp(path) as sftp:
            attributes = await sftp.stat(path)
        return FileState(attributes.size or 0, float(attributes.mtime or 0))

    async def read(self, offset: int, size: int, name: str | None = None) -> bytes:
        """Return `size` bytes from `offset` of the log or of the file `name`."""
        path = self._path(name)
        async with self._host.sftp(path) as sftp, sftp.open(path, "rb") as file:
            data: bytes = await file.read(size, offset)
            return data

    async def rotated(self) -> list[str]:
        """Return the names of files in the same folder that may be older parts of the log, the newest first."""
        path = self._path(None)
        async with self._host.sftp(path) as sftp:
            entries = await sftp.readdir(path.parent)
        return rotated_names(path.name, ((str(entry.filename), float(entry.attrs.mtime or 0)) for entry in entries))

    async def clock(self) -> MachineClock | None:
        """Return the clock of the machine, or None if the server executes no commands."""
        return await self._host.clock()
