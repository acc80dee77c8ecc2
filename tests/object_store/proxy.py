"""A proxy of an S3 server that names and counts requests, injects faults, and kills the process that sends them.

The proxy forwards bytes, one request per connection. Signatures remain valid because the header Host is not changed.
"""

import asyncio
import contextlib
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import parse_qs, unquote, urlsplit

ERRORS: Final = {
    "InternalError": 500,
    "ServiceUnavailable": 503,
    "SlowDown": 503,
    "ExpiredToken": 400,
    "InvalidAccessKeyId": 403,
    "AccessDenied": 403,
    "RequestTimeTooSkewed": 403,
    "NoSuchBucket": 404,
}
"""Errors of S3 and their status, as Amazon documents them: a fault with such a name sends this answer."""

CREATED: Final = b'HTTP/1.1 200 OK\r\nETag: "0"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n'
PHASES: Final = ("kill before", "kill during", "kill after")
CHANGES: Final = ("PUT", "POST", "DELETE")
_LAST_MODIFIED: Final = (
    (re.compile(rb"<LastModified>\d{4}-\d\d-\d\dT\d\d"), b"<LastModified>2023-11-14T22"),
    (re.compile(rb"(?i)\r\nLast-Modified: \w{3}, \d\d \w{3} \d{4}"), b"\r\nLast-Modified: Tue, 14 Nov 2023"),
)


@dataclass(slots=True, kw_only=True)
class Fault:
    """Faults at `count` requests whose name matches the pattern `request`, from the `nth` such request on.

    `kind` is a name in ERRORS, one of PHASES, or one of these:

    - lost answer: forward, and close the connection without an answer;
    - timeout before: forward nothing, and close the connection after `seconds`;
    - timeout after: forward, and close the connection after `seconds`;
    - late: close the connection, and forward after `seconds`, when the client may have sent the request again;
    - slow: transfer `bytes_per_second`;
    - unconditional: report success where the server refuses to create an object that exists.
    """

    kind: str
    request: str = ""
    nth: int = 1
    count: int = 1
    seconds: float = 0.2
    bytes_per_second: int = 20_000
    seen: int = 0

    def meets(self, name: str) -> bool:
        """Return whether the fault happens at the request; every call is one more request."""
        if not re.search(self.request, name):
            return False
        self.seen += 1
        return self.nth <= self.seen < self.nth + self.count


def named(method: str, target: str) -> str:
    """Return the name of a request, such as "PUT entry", "GET checkpoint", "PUT data", "LIST log" or "POST delete"."""
    parts = urlsplit(target)
    query = parse_qs(parts.query, keep_blank_values=True)
    _, _, key = unquote(parts.path).lstrip("/").partition("/")
    if method == "GET" and not key:
        method, key = "LIST", query.get("prefix", [""])[0]
    if method == "POST" and "delete" in query:
        return "POST delete"
    if "_delta_log" in key:
        if "checkpoint" in key:
            return f"{method} checkpoint"
        return f"{method} entry" if key.endswith(".json") else f"{method} log"
    return f"{method} data" if "dataset=" in key else f"{method} other"


@dataclass(slots=True, kw_only=True)
class Proxy:
    """A proxy of the server at `server`, http://host:port, in a separate thread.

    `requests` has the names of all requests since `arm`; `changes` has those of them that changed the server. `victim`
    returns the process that a fault kills. While `aged`, all objects appear to be from 2023.
    """

    server: str
    requests: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    victim: Callable[[], int] | None = None
    aged: bool = False
    url: str = ""
    _faults: list[Fault] = field(default_factory=list)
    _active: int = 0
    _quiet: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _thread: threading.Thread = field(init=False)

    def arm(self, *faults: Fault) -> None:
        """Replace the faults and forget all earlier requests."""
        self.wait_until_idle()
        self._faults, self.requests, self.changes = list(faults), [], []

    def wait_until_idle(self) -> None:
        """Wait until no request is being forwarded, also none of a process that was killed."""
        asyncio.run_coroutine_threadsafe(self._idle(), self._loop).result(timeout=60)

    async def _idle(self) -> None:
        await asyncio.sleep(0.01)  # a process that was killed just now may have sent a request that is not read yet
        await self._quiet.wait()

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.requests)

    def __enter__(self) -> Self:
        self._quiet.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        listening = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(timeout=10)
        self.url = "http://{}:{}".format(*listening.sockets[0].getsockname()[:2])
        return self

    def __exit__(self, *_: object) -> None:
        self.wait_until_idle()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._handle, "127.0.0.1", 0, limit=1 << 20)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._active += 1
        self._quiet.clear()
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._exchange(reader, writer)
        finally:
            writer.transport.abort()  # without an answer, the client sees a reset connection
            self._active -= 1
            if not self._active:
                self._quiet.set()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target = (word.decode() for word in head.split(b" ", 2)[:2])
        headers = {name.lower(): value for name, value in re.findall(rb"\r\n([^:\r]+): *([^\r]*)", head)}
        if b"expect" in headers:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(int(headers.get(b"content-length", 0)))
        name = named(method, target)
        self.requests.append(name)
        met = [fault for fault in self._faults if fault.meets(name)]
        fault = met[0] if met else Fault(kind="")
        head = re.sub(rb"(?i)\r\n(?:connection|expect):[^\r]*", b"", head)[:-2] + b"Connection: close\r\n\r\n"
        if fault.kind == "late":
            writer.transport.abort()
        try:
            answer = await self._answer(name, head, body, fault)
            if fault.kind == "kill during":
                writer.write(answer[: len(answer) // 2])
                await writer.drain()
            elif answer and fault.kind not in {"late", "lost answer", "timeout after"}:
                await _send(writer, answer, fault)
        finally:  # also if the client or the server has closed the connection
            if fault.kind in {"kill during", "kill after"}:
                self._kill()

    async def _answer(self, name: str, head: bytes, body: bytes, fault: Fault) -> bytes:
        if fault.kind in ERRORS:
            return _error(fault.kind, head)
        if fault.kind in {"timeout before", "late"}:
            await asyncio.sleep(fault.seconds)
        if fault.kind == "slow":
            await asyncio.sleep(len(body) / fault.bytes_per_second)
        if fault.kind == "kill before":
            self._kill()
        if fault.kind in {"timeout before", "kill before"}:
            return b""
        is_cut = fault.kind == "kill during" and len(body) > 1
        answer = await self._forward(name, head, body[: len(body) // 2] if is_cut else body, is_cut=is_cut)
        if fault.kind == "kill after":
            return b""
        if fault.kind == "timeout after":
            await asyncio.sleep(fault.seconds)
        return CREATED if fault.kind == "unconditional" and b" 412 " in answer[:16] else answer

    async def _forward(self, name: str, head: bytes, body: bytes, *, is_cut: bool) -> bytes:
        """Return the server's answer; empty if the request is cut, that is, without the rest of its body."""
        parts = urlsplit(self.server)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(head + body)
            await writer.drain()
            if is_cut:
                return b""
            answer = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\nContent-Length: *(\d+)", answer)
            if not head.startswith(b"HEAD"):
                answer += await (reader.readexactly(int(length[1])) if length else reader.read())
        finally:
            writer.close()
        if name.partition(" ")[0] in CHANGES and answer[9:10] == b"2":
            self.changes.append(name)
        if self.aged:
            for found, old in _LAST_MODIFIED:
                answer = found.sub(old, answer)
        return answer

    def _kill(self) -> None:
        if self.victim is not None:
            os.kill(self.victim(), signal.SIGKILL)


async def _send(writer: asyncio.StreamWriter, answer: bytes, fault: Fault) -> None:
    step = fault.bytes_per_second // 20 if fault.kind == "slow" else len(answer)
    for start in range(0, len(answer), step):
        writer.write(answer[start : start + step])
        await writer.drain()
        if fault.kind == "slow":
            await asyncio.sleep(0.05)
    writer.close()
    await writer.wait_closed()


def _error(code: str, head: bytes) -> bytes:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}, for a test</Message></Error>".encode()
    body = b"" if head.startswith(b"HEAD") else text
    fields = f"Content-Type: application/xml\r\nContent-Length: {len(text)}\r\nConnection: close"
    return f"HTTP/1.1 {ERRORS[code]} {code}\r\n{fields}\r\n\r\n".encode() + body
