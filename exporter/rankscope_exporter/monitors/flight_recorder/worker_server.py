"""torch's worker server on a private Unix socket: runs a handler of torch on a C++ thread and returns its answer.

torch releases the GIL only while a handler runs. `dump_nccl_trace_json` needs a request object of torch's C++ type,
which Python cannot create; the server creates one for each HTTP request. It starts at the first request and runs until
the process exits, because its shutdown holds the GIL and waits for a handler that may not return. The
module works only on Linux, as NCCL does.
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
"""Number of threads that the process must be able to start in addition to those of the server.

Other processes may start threads at the same time.
"""

_LEAST_THREADS: Final = 8  # cpp-httplib starts max(8, processors - 1) threads, and torch one that accepts connections


class WorkerServer:
    """Client of torch's worker server in this process. Thread-safe. It sends one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._address: str | None = None  # None until the server is started
        self._unanswered: _Connection | None = None

    def ask(self, handler: str, seconds: float, body: str = "") -> bytes:
        """Return the answer of the handler with the name `handler`.

        Raises TimeoutError if there is no answer within `seconds`.

        Each request waits until the handler of the previous one has returned. A device that hangs therefore blocks one
        thread of the server and not all of them.
        """
        deadline = time.monotonic() + seconds
        if not self._lock.acquire(timeout=seconds):
            raise TimeoutError(
                f"timed out after {seconds:g} s: another request to torch's worker server has no answer yet"
            )
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
        poll = select.poll()  # select.select() does not support descriptors above 1023
        poll.register(connection.sock, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError(f"no answer within {seconds:g} s from torch's worker server")
        self._unanswered = None


_servers: Final[dict[int, WorkerServer]] = {}
"""Worker servers by process id.

A forked child has a copy of this table, but not the threads of its parent's server. It therefore starts its own server.
"""


def worker_server() -> WorkerServer:
    """Return the worker server of this process. The server starts with the first request."""
    return _servers.setdefault(os.getpid(), WorkerServer())


def register_handler(name: str, function: Callable[[Any, Any], None]) -> None:
    """Register the handler `function(request, response)` under `name` in torch's table of worker server handlers.

    The arguments of the handler are C++ objects of torch. An existing name is not changed, because torch can neither
    remove nor replace a handler.
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
    """Start the worker server and return the path of its socket in /proc.

    The file of the socket is deleted afterwards.
    """
    if not has_room_for(1 + max(_LEAST_THREADS, os.cpu_count() or 1) + SPARE_THREADS):
        raise RuntimeError("the process cannot start the threads of torch's worker server")
    folder = tempfile.mkdtemp(prefix="rankscope-")  # mode 0700
    inside = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        name = f"/proc/self/fd/{inside}/worker"  # the temporary folder may exceed the 107 bytes of a socket path
        _keep_for_ever(torch._C._distributed_c10d._WorkerServer(name))  # noqa: SLF001 - torch has no public name for it
        descriptor = os.open(name, os.O_PATH)
    finally:
        os.close(inside)
        shutil.rmtree(folder, ignore_errors=True)
    return f"/proc/self/fd/{descriptor}"


def _keep_for_ever(thing: object) -> None:
    """Prevent the destruction of `thing` when the interpreter exits.

    Threads and tables of torch may still use the object at that time.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def has_room_for(threads: int) -> bool:
    """Return whether this process can start `threads` more threads.

    torch's server terminates the process if it cannot start one of its threads. The threads that are started here for
    the test sleep for 20 ms in C and do not compete for the GIL.
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
