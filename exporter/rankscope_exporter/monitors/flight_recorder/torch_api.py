"""Reads torch's flight recorders, which record all collectives of a process, and torch's process groups.

A recorder is always on (`TORCH_FR_BUFFER_SIZE`, 2000 entries). A reading copies the entries and changes nothing. The
functions of a recorder are private in torch, so this module looks up each one by name. If torch lacks the functions of
a recorder, the recorder has no entries. There are two methods of reading: with the Python stack of each entry, while
torch holds the GIL; or without stacks and without the GIL. A recorder that cannot be read is reported, and the entries
of the other recorders are returned.

torch's worker server on a private Unix socket: runs a handler of torch on a C++ thread and returns its answer.

torch releases the GIL only while a handler runs. `dump_nccl_trace_json` needs a request object of torch's C++ type,
which Python cannot create; the server creates one for each HTTP request. It starts at the first request and runs until
the process exits, because its shutdown holds the GIL and waits for a handler that may not return. The
module works only on Linux, as NCCL does.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import http.client
import importlib
import io
import json
import logging
import os
import pickle
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from rankscope_exporter.adapters import torch_private
from rankscope_exporter.adapters.tracing import others_may_capture

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
        self._unanswered: http.client.HTTPConnection | None = None

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
            connection = http.client.HTTPConnection("localhost")
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(seconds)
            connection.sock.connect(self._address)
            connection.request("POST", f"/handler/{handler}", body, {"Connection": "close"})
            self._wait(connection, deadline, seconds)
            response = connection.getresponse()
            content = response.read()
        finally:
            self._lock.release()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(content.decode(errors="replace"))
        return content

    def _wait(self, connection: http.client.HTTPConnection, deadline: float, seconds: float) -> None:
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
    """Register `function(request, response)`, which gets C++ objects; torch can neither remove nor replace handlers."""
    if name not in torch_private.handler_names():
        _keep_for_ever(function)
        torch_private.add_handler(name, function)


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
        _keep_for_ever(torch_private.new_worker_server(name))
        descriptor = os.open(name, os.O_PATH)
    finally:
        os.close(inside)
        shutil.rmtree(folder, ignore_errors=True)
    return f"/proc/self/fd/{descriptor}"


def _keep_for_ever(thing: object) -> None:
    # Threads and tables of torch may still use the object at that time.
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


Raw = Mapping[str, Any]
"""One entry of a flight record, as torch writes it."""

Entries = dict[str, Sequence[Raw]]
"""The entries of each flight recorder that has some, oldest first, by the name of the recorder."""

Report = Callable[[str, BaseException], None]
"""Function that reports a failed operation and its error, for example `ErrorBoundary.report`."""

ANSWER_SECONDS: Final = 1.5
"""Timeout in seconds for a recorder that queries the device.

It is shorter than the 2 s that the diagnosis of a hang waits in total.
"""

log = logging.getLogger("rankscope")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRecorder:
    """One of torch's flight recorders, with the names of the functions and of the handler that return its entries."""

    name: str
    with_stacks: str
    """Name of the flight record for `dump_function`, which returns a pickle of the entries with their stacks.

    The function holds the GIL.
    """
    plain: str
    """Name for `dump_function` of the entries as JSON without stacks. The function holds the GIL."""
    handler: str
    """Name of the handler of torch's worker server that returns the entries as JSON. It runs without the GIL."""
    asks_device: bool = False
    """True if torch queries the device for the state of entries, so that a device that hangs blocks the reading."""


CPU: Final = TorchRecorder(name="cpu", with_stacks="fr_trace", plain="fr_trace_json", handler="fr_trace_json")
"""The flight recorder of Gloo.

torch's handler that returns the entries of this recorder does not read its request argument. Any Python object can
therefore be passed as the request.
"""

NCCL: Final = TorchRecorder(
    name="nccl", with_stacks="nccl_trace", plain="nccl_trace_json", handler="dump_nccl_trace_json", asks_device=True
)
"""The flight recorder of NCCL, and of RCCL under the same names. It exists only if torch was built with NCCL."""

_RELAY: Final = "rankscope_"
_URGENT: Final = "urgent"

_NEEDED: Final = ("record_id", "time_created_ns", "profiling_name", "process_group", "collective_seq_id", "p2p_seq_id")
"""Names of the fields that an entry of a flight record must have; entries without one of them are skipped."""


def prepare_stacks() -> bool:
    """Import the module that torch needs to write stacks; return whether stacks can be read.

    The module is the part of the compiler that handles stacks of compiled code. The import takes 0.2 s if the compiler
    is loaded, for example after the first step of any torch optimizer. Otherwise the import would take 2 s, so it is
    skipped and stacks are not read.
    """
    if not torch_private.is_compiler_loaded():
        return False
    try:
        importlib.import_module(torch_private.STACK_READER)
    except Exception as error:  # noqa: BLE001 - an import of the compiler may raise anything
        log.debug("flight records are read without stacks: importing %s raised %r", torch_private.STACK_READER, error)
        return False
    return True


def read_with_stacks(report: Report) -> Entries:
    """Return the entries of each recorder, oldest first, with Python stacks in `frames`: 25 µs of the GIL per entry."""
    return _read(_pickled, report)


def read_without_stacks(report: Report, *, is_urgent: bool = False) -> Entries:
    """Return the entries of each recorder without the field `frames`, oldest first. torch does not hold the GIL.

    A recorder that queries the device is skipped after ANSWER_SECONDS. With `is_urgent`, the device is queried even if
    its runtime has no mode that protects graph captures of other threads.
    """
    return _read(functools.partial(_json, is_urgent=is_urgent), report)


def _recorders() -> list[TorchRecorder]:
    # NCCL's flight recorder is left out if this process has not used a GPU: the recorder has no entries then.
    return [CPU, NCCL] if torch.cuda.is_initialized() else [CPU]  # type: ignore[no-untyped-call]  # untyped in torch


def _read(read: Callable[[TorchRecorder], Any], report: Report) -> Entries:
    """Return the entries of each flight recorder by the name of the recorder.

    Recorders that cannot be read are reported.
    """
    found: Entries = {}
    for recorder in _recorders():
        where = f"reading the flight record of {recorder.name}"
        try:
            document = read(recorder)
            entries = () if document is None else _complete(document.get("entries", ()), where, report)
        except Exception as error:  # noqa: BLE001 - the other recorders are read after an error of one
            report(where, error)
            continue
        if entries:
            found[recorder.name] = entries
    return found


def _complete(entries: Sequence[Raw], where: str, report: Report) -> Sequence[Raw]:
    """Return those of the flight record's `entries` that have all fields this package reads, oldest first."""
    # The number of entries that lack a field is reported through `report`.
    complete = [entry for entry in entries if all(entry.get(name) is not None for name in _NEEDED)]
    if missing := len(entries) - len(complete):
        report(where, ValueError(f"{missing} of {len(entries)} entries lack one of the fields {_NEEDED}"))
    return sorted(complete, key=lambda entry: int(entry["record_id"]))


def _pickled(recorder: TorchRecorder) -> Any:
    function = torch_private.dump_function(recorder.with_stacks)
    if function is None:
        return None
    with _while_others_capture() if recorder.asks_device else contextlib.nullcontext():
        dump = function(True, True, False)
    return _Plain(io.BytesIO(dump)).load()


def _json(recorder: TorchRecorder, *, is_urgent: bool) -> Any:
    function = torch_private.dump_function(recorder.plain)
    ask = _ask_device if recorder.asks_device else _ask
    if recorder.handler in torch_private.handler_names():
        try:
            return json.loads(ask(recorder.handler, is_urgent=is_urgent))
        except Exception as error:
            # After a timeout, the function would wait for the same device and hold the GIL.
            if function is None or isinstance(error, TimeoutError):
                raise
            log.debug("torch's handler %s failed, calling its function instead: %r", recorder.handler, error)
    if function is None:
        return None
    with _while_others_capture(is_urgent=is_urgent) if recorder.asks_device else contextlib.nullcontext():
        return json.loads(function(True, False))


class _Plain(pickle.Unpickler):
    """Unpickler that reads numbers, strings, lists and dicts only.

    It raises UnpicklingError for any class or function, and calls none.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a flight record must not contain a reference to {module}.{name}")


# Handlers of torch's worker server: the only functions that write the record without the GIL.


def _ask(handler: str, *, is_urgent: bool) -> str:  # noqa: ARG001 - the signature of _ask_device
    """Call a handler of torch's flight recorder on the current thread and return its answer.

    The handler must not read the request object that it receives.
    """
    given: list[str] = []
    takes = {"set_content": lambda _, content, _type: given.append(content), "set_status": lambda *_: None}
    request_type, response_type = torch_private.handler_types()
    torch_private.handler_of(handler)(request_type(), type("Response", (response_type,), takes)())
    return "".join(given)


def _ask_device(handler: str, *, is_urgent: bool) -> bytes:
    """Call a handler on a thread of torch's worker server, and return its answer.

    The handler queries the device, which may not respond.
    """
    if not torch_private.has_worker_server():
        raise RuntimeError("this release of torch has no worker server, which the flight recorder of the device needs")
    relay = f"{_RELAY}{handler}"
    register_handler(relay, functools.partial(_relay, handler))
    return worker_server().ask(relay, ANSWER_SECONDS, _URGENT if is_urgent else "")


def _relay(handler: str, request: Any, response: Any) -> None:
    """Call the handler with torch's request and response objects."""
    # During the call, this thread is in a mode in which it may query the device while other threads capture graphs.
    with _while_others_capture(is_urgent=request.body() == _URGENT):
        torch_private.handler_of(handler)(request, response)


@contextlib.contextmanager
def _while_others_capture(*, is_urgent: bool = False) -> Iterator[None]:
    """Permit this thread to query events of the device without invalidating a graph capture of another thread."""
    # Raises RuntimeError if the runtime of the device has no mode for this. With `is_urgent` it does not raise,
    # because a rank that hangs captures no graph.
    with others_may_capture() as is_relaxed:
        if not is_relaxed and not is_urgent:
            raise RuntimeError("the runtime of the device cannot read the flight record during graph captures")
        yield


def ranks_by_group(report: Report) -> dict[str, tuple[int, ...]]:
    """Return the global ranks of each process group of this rank, by group id. torch has no public function for this.

    An error is reported and not raised, because a flight record without the ranks of its groups is still useful.
    """
    found: dict[str, tuple[int, ...]] = {}
    try:
        for group, name in list(torch_private.group_names().items()):
            with contextlib.suppress(ValueError, RuntimeError):  # the group was destroyed in the meantime
                found[str(name)] = tuple(sorted(dist.get_process_group_ranks(group)))
    except Exception as error:  # noqa: BLE001 - reads a private structure of torch, which may change
        report("looking up the ranks of process groups", error)
    return found
