"""Torch's worker server on a private Unix socket: runs a handler of torch on a C++ thread and returns its answer.

Torch releases the interpreter lock only while a handler runs. `dump_nccl_trace_json` needs a request of torch's own C++
type, which no Python object can replace; the server makes one for each HTTP request. It is started at the first
request and runs until the process ends: torch holds the interpreter lock while the server shuts down, and would wait
for a handler that does not return. Linux only, as NCCL is.
"""

from __future__ import annotations

import ctypes
import http.client
import os
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch

SPARE_THREADS: Final = 16
"""Threads that must be free beyond those of the server: other processes start threads at the same time."""

_LEAST_THREADS: Final = 8  # cpp-httplib starts max(8, processors - 1) threads, and torch one that accepts connections


class WorkerServer:
    """The worker server of this process. Thread-safe; one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._address: str | None = None  # None until the server is started
        self._unanswered: _Connection | None = None

    def ask(self, handler: str, seconds: float, body: str = "") -> bytes:
        """Return the answer of the handler called `handler`.

        Raises TimeoutError after `seconds`. While a handler has not returned, no other request is sent, so that a
        device that hangs takes one thread of the server and not all of them.
        """
        deadline = time.monotonic() + seconds
        if not self._lock.acquire(timeout=seconds):
            raise TimeoutError(f"another request has waited for {seconds:g} s")
        try:
            if self._address is None:
                self._address = _start()
            if (earlier := self._unanswered) is not None:
                self._wait(earlier, deadline, seconds)
                earlier.close()
            connection = _Connection(self._address, seconds)
            connection.request("POST", f"/handler/{handler}", body, {"Connection": "close"})
            self._wait(connection, deadline, seconds)
            response = connection.getresponse()
            content = response.read()
        finally:
            self._lock.release()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(content.decode(errors="replace"))
        return content

    def _wait(self, connection: _Connection, deadline: float, seconds: float) -> None:
        self._unanswered = connection
        poll = select.poll()  # select.select() refuses descriptors from 1024 on
        poll.register(connection.sock, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError(f"no answer within {seconds:g} s")
        self._unanswered = None


_servers: Final[dict[int, WorkerServer]] = {}
"""By process: a forked child has a copy of this table, and none of the threads of its parent's server."""


def worker_server() -> WorkerServer:
    """Return the server of this process; it is started by its first request."""
    return _servers.setdefault(os.getpid(), WorkerServer())


def register_handler(name: str, function: Callable[[Any, Any], None]) -> None:
    """Have `function(request, response)` called for requests to `name`, with torch's own C++ objects.

    A name that exists is left as it is: torch has no way to remove or replace a handler.
    """
    c10d: Any = torch._C._distributed_c10d  # noqa: SLF001 - torch has no public name for it
    if name not in c10d._get_handler_names():  # noqa: SLF001 - see above
        _keep_for_ever(function)
        c10d._register_handler(name, function)  # noqa: SLF001 - see above


class _Connection(http.client.HTTPConnection):
    def __init__(self, address: str, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._address = address

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._address)


def _start() -> str:
    """Start the server and return the path under which this process reaches its socket, which has no other name."""
    if not has_room_for(1 + max(_LEAST_THREADS, os.cpu_count() or 1) + SPARE_THREADS):
        raise RuntimeError("the process may not start the threads of torch's worker server")
    folder = tempfile.mkdtemp(prefix="rankscope-")  # mode 0700
    inside = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        name = f"/proc/self/fd/{inside}/worker"  # a path of sockets has at most 107 bytes, a temporary folder may not
        _keep_for_ever(torch._C._distributed_c10d._WorkerServer(name))  # noqa: SLF001 - torch has no public name for it
        descriptor = os.open(name, os.O_PATH)
    finally:
        os.close(inside)
        shutil.rmtree(folder, ignore_errors=True)
    return f"/proc/self/fd/{descriptor}"


def _keep_for_ever(thing: object) -> None:
    """Keep `thing` from being destroyed when the interpreter ends: the threads and tables of torch go on using it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def has_room_for(threads: int) -> bool:
    """Return whether this process may start so many threads more.

    Torch's server ends the whole process where it cannot start one of its own. The threads that are started here sleep
    for a moment in C, so they do not compete for the interpreter lock.
    """
    c = ctypes.CDLL(None)
    sleep, microseconds = ctypes.cast(c.usleep, ctypes.c_void_p), ctypes.c_void_p(20_000)
    started: list[ctypes.c_ulong] = []
    while len(started) < threads:
        thread = ctypes.c_ulong()
        if c.pthread_create(ctypes.byref(thread), None, sleep, microseconds) != 0:
            break
        started.append(thread)
    for thread in started:
        c.pthread_join(thread, None)
    return len(started) == threads
