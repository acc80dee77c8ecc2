"""Reads and publishes the stacks of all threads of this process, and the flight record with the latest collectives.

This happens after a hang, at a request of the script or over HTTP, after a signal, and at a capture.

Events are published directly, without the publisher thread: that thread may be waiting for a device that hangs.

The stacks of all threads of this process, read by faulthandler: files, lines and functions, but no values.

faulthandler walks the frames in C and takes no lock, so it works whatever the threads wait for. A call from Python
needs the GIL. While C code holds the GIL, only the handler of a configured signal can read stacks (`stack_signal`).

A stack ends at a line of Python code. The name of the C function that a thread executes is derived from the bytecode:
from the current instruction and the names that were loaded for it. No value, argument or local variable is read, and no
attribute of any object except modules, because both could run code of the training.

Handler of the signal in the setting `stacks_signal`.

It writes the stacks of all threads, even while C code holds the GIL.

The handler of faulthandler runs in C immediately when the signal arrives. It writes to a file, which the watchdog
thread reads when Python code runs again. If that never happens, an operator can read the file.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import faulthandler
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final

from rankscope_contract.model.events import Event, EventType, ExitReason, Severity
from rankscope_contract.model.stacks import MAX_DETAILS_BYTES, FlightRecord, Frame, StackDump, Standing, ThreadStack
from rankscope_exporter.monitors.flight_recorder.poller import OUR_CODE, take_flight_record
from rankscope_exporter.process.errors import ConfigError, ErrorBoundary, encodable
from rankscope_exporter.process.lifecycle import exit_event
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.records.record import StepRecord, now_microseconds

STACK_SIGNALS: Final = ("SIGUSR1", "SIGUSR2", "SIGQUIT")
"""Names of the signals that the setting `stacks_signal` accepts.

Python does not use these signals. Other signals terminate a process or report a fault.
"""


class StackSignal:
    """A signal handler of faulthandler that writes the stacks of all threads to a file.

    The constructor registers the handler, and `restore` removes it. A Python handler that was registered before is
    still called.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._number = signal.Signals[name]
        self._before = signal.getsignal(self._number)
        _refuse_foreign(self._number, self._before)
        descriptor, path = tempfile.mkstemp(prefix=f"rankscope-stacks-{os.getpid()}-", suffix=".txt")  # mode 0600
        os.close(descriptor)
        self.path = Path(path)
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._seen = 0
        # Chained to the default action, the signal would end the process.
        chain = self._before not in (signal.SIG_DFL, signal.SIG_IGN)
        faulthandler.register(self._number, file=self._descriptor, all_threads=True, chain=chain)

    def written(self) -> str | None:
        """Return the stacks that the signal handler has written to its file, and empty the file.

        Return None if there are no stacks, or if the handler may still be writing. The handler counts as finished when
        the file has the same size in two consecutive calls.
        """
        size = os.fstat(self._descriptor).st_size
        if size == 0 or size != self._seen:
            self._seen = size
            return None
        text = os.pread(self._descriptor, size, 0).decode("utf-8", "replace")
        os.ftruncate(self._descriptor, 0)
        self._seen = 0
        return text

    def restore(self) -> None:
        """Restore the previous signal handler, and delete the file to which the present handler writes stacks.

        If the script has installed a later handler for the signal, that handler remains.
        """
        since = signal.getsignal(self._number)
        faulthandler.unregister(self._number)
        if since is not self._before and since is not None:
            with contextlib.suppress(ValueError):  # only the main thread may set a handler
                signal.signal(self._number, since)
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)

    def abandon_after_fork(self) -> None:
        """Unregister the handler in a forked child; the file with the stacks belongs to the parent and remains."""
        faulthandler.unregister(self._number)
        os.close(self._descriptor)


def _refuse_foreign(number: signal.Signals, handler: object) -> None:
    """Raise ConfigError if C code handles the signal `number`, because faulthandler would replace that handler."""
    if handler is None or (handler in (signal.SIG_DFL, signal.SIG_IGN) and _is_caught(number)):
        others = " or ".join(name for name in STACK_SIGNALS if name != number.name)
        raise ConfigError(
            f"stacks_signal: {number.name} already has a handler in C code, for example of faulthandler; use {others}"
        )


def _is_caught(number: signal.Signals) -> bool:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:  # a container may hide it
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


EXECUTES_PYTHON: Final = ""

MOST_BYTES: Final = 16_384
"""Maximum size in bytes of the bytecode that is analyzed, which is about 450 lines of Python.

The analysis holds the GIL for up to 7 ms.
"""

_BASES: Final = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTES: Final = ("LOAD_ATTR", "LOAD_METHOD")
_CALLS: Final = ("CALL", "PRECALL")
_PARTS_OF_A_CALL: Final = ("PRECALL", "PUSH_NULL", "KW_NAMES", "CACHE", "LOAD_CONST")
_OF_THE_INTERPRETER: Final = ("JUMP_BACKWARD", "RESUME", "NOP")
"""Bytecode instructions that call no function, but at which a thread may release the GIL."""


def innermost_call(thread: int) -> tuple[Frame, str | None] | None:
    """Return the innermost frame of a thread, and the name of the function that this frame calls.

    Return None if the thread does not exist.
    """
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - documented, despite its name
    if frame is None:
        return None
    code = frame.f_code
    # faulthandler writes file names in ASCII.
    file = code.co_filename.encode("ascii", "backslashreplace").decode("ascii")
    return Frame(file, frame.f_lineno or 0, code.co_name), called(code, frame.f_lasti, frame.f_globals)


def called(code: CodeType, offset: int, global_names: Mapping[str, Any]) -> str | None:
    """Return the name of the function that the bytecode instruction at `offset` calls.

    The name is empty if the instruction calls no function. Return None if the name is unknown, or if the bytecode is
    longer than the limit MOST_BYTES.
    """
    if len(code.co_code) > MOST_BYTES:
        return None
    instructions = list(dis.get_instructions(code))
    at = next((place for place, one in enumerate(instructions) if one.offset == offset), None)
    if at is None:
        return None
    if instructions[at].opname.startswith(_OF_THE_INTERPRETER):
        return EXECUTES_PYTHON
    if not instructions[at].opname.startswith(_CALLS):
        return None
    return _name(_callee(instructions[: at + 1]), global_names)


def _callee(instructions: Sequence[dis.Instruction]) -> list[dis.Instruction]:
    """Return the instructions that load the function of a call, in order. The call is the last of `instructions`.

    They are the instructions whose source position begins where the call begins. For `time.sleep(1)`, they load `time`
    and `sleep`; the argument `1` begins at a later position.
    """
    start = _start(instructions[-1])
    found: list[dis.Instruction] = []
    for one in reversed(instructions[:-1]):
        if start is None or _start(one) != start:
            if found:
                break
        elif one.opname not in _PARTS_OF_A_CALL:
            if not one.opname.startswith("LOAD_"):
                break  # the function is the result of a call or a subscript
            found.insert(0, one)
            if not one.opname.startswith(_ATTRIBUTES):
                break
    return found


def _start(instruction: dis.Instruction) -> tuple[int, int] | None:
    positions = instruction.positions
    if positions is None or positions.lineno is None or positions.col_offset is None:
        return None
    return positions.lineno, positions.col_offset


def _name(loaded: Sequence[dis.Instruction], global_names: Mapping[str, Any]) -> str | None:
    if not loaded:
        return None
    if loaded[0].opname.startswith(_BASES):
        function = _resolved([str(one.argval) for one in loaded], global_names)
        if isinstance(function, (BuiltinFunctionType, FunctionType, type)) and isinstance(function.__module__, str):
            return f"{function.__module__}.{function.__name__}"
    return f".{loaded[-1].argval}" if loaded[-1].opname.startswith(_ATTRIBUTES) else None


def _resolved(names: Sequence[str], global_names: Mapping[str, Any]) -> Any:
    """Return the object with a dotted name, for example a function for the `names` `torch`, `cuda` and `synchronize`.

    Only attributes of modules are read. The result is None if an element before the last one is not a module.
    """
    found = global_names.get(names[0], vars(builtins).get(names[0]))
    for name in names[1:]:
        if not isinstance(found, ModuleType):
            return None
        found = vars(found).get(name)
    return found


OUR_THREADS: Final = "rankscope-"
_CURRENT: Final = "Current thread"
_THREAD: Final = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)\b.*\(most recent call first\):$")
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_FRAME_LIMITS: Final = (100, 40, 15, 5)  # frames of each thread except the training thread; tried until the dump fits


def take_stacks(reason: str, training_thread: int) -> StackDump:
    """Return the current stacks of all threads.

    The stack of the calling thread does not contain frames of this package.
    """
    dump = read_stacks(_dumped(), reason, training_thread, _names())
    found = None if training_thread == threading.get_ident() else innermost_call(training_thread)
    thread = dump.training_thread
    if thread is None or found is None or thread.frames[:1] != found[:1]:
        return dump  # the training thread has continued since the dump
    called = replace(thread, calls=found[1])
    return replace(dump, threads=tuple(called if other is thread else other for other in dump.threads))


def read_stacks(text: str, reason: str, training_thread: int, names: Mapping[int, str]) -> StackDump:
    """Parse stacks from `text`, the output of faulthandler. Lines in another format are skipped."""
    found: list[tuple[int, bool, list[Frame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            found.append((int(head[1], 16), line.startswith(_CURRENT), []))
        elif found and (call := _FRAME.match(line)):
            found[-1][2].append(Frame(call[1], int(call[2]) if call[2].isdecimal() else 0, call[3]))
    threads = [
        ThreadStack(
            ident=ident,
            frames=_without_our_calls(frames) if is_current else tuple(frames),
            name=names.get(ident),
            is_training=ident == training_thread,
            is_ours=names.get(ident, "").startswith(OUR_THREADS),
        )
        for ident, is_current, frames in found
    ]
    threads.sort(key=lambda thread: (thread.is_ours, not thread.is_training))
    return within(StackDump(reason=reason, threads=tuple(threads)), MAX_DETAILS_BYTES)


def within(dump: StackDump, max_bytes: int) -> StackDump:
    """Return `dump`, shortened to at most `max_bytes` of JSON.

    First, threads other than the training thread lose their outermost frames, and then are removed. The training thread
    is shortened last.
    """
    for limit in _FRAME_LIMITS:
        if _size(dump) <= max_bytes:
            return dump
        dump = replace(dump, threads=tuple(t if t.is_training else _cut(t, limit) for t in dump.threads))
    while _size(dump) > max_bytes and len(dump.threads) > 1:
        dump = replace(dump, threads=dump.threads[:-1], left_out=dump.left_out + 1)
    return dump if _size(dump) <= max_bytes else replace(dump, threads=tuple(_cut(t, 5) for t in dump.threads))


def _dumped() -> str:
    is_in_memory = hasattr(os, "memfd_create")  # a build of Python for an old release of Linux lacks it
    with os.fdopen(os.memfd_create("stacks"), "w+b") if is_in_memory else tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file.fileno(), all_threads=True)
        file.seek(0)
        return file.read().decode("utf-8", "replace")


def _names() -> dict[int, str]:
    return {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}


def _without_our_calls(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return `frames` without the innermost frames of this package."""
    # A thread that has only frames of this package keeps all of them.
    own = next((i for i, frame in enumerate(frames) if not frame.file.startswith(OUR_CODE)), 0)
    return tuple(frames[own:])


def _size(dump: StackDump) -> int:
    return len(dump.to_json().encode())


def _cut(thread: ThreadStack, frames: int) -> ThreadStack:
    return replace(thread, frames=thread.frames[:frames])


MIN_SECONDS: Final = 2.0
"""Minimum seconds between two readings of the stacks.

A caller that requests stacks within this time receives the result of the previous reading, and nothing is published.
"""

LOCK_SECONDS: Final = 5.0
"""Maximum seconds that a thread waits for another thread that reads stacks and may be blocked by a disk or device."""

FLIGHT_SECONDS: Final = 2.0
"""Timeout in seconds for the flight record. torch queries the device, and a device that hangs may not respond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStacks:
    """The stacks of all threads and the flight record of this process at one time."""

    ts: int  # UTC microseconds
    step: int | None  # the last published step
    stacks: StackDump
    flight: FlightRecord | None

    def document(self, rank: int) -> dict[str, Any]:
        """Return the stacks and the flight record as the JSON object with which the rank answers POST /stacks."""
        flight = None if self.flight is None else self.flight.document()
        return {"rank": rank, "ts": self.ts, "step": self.step, "stacks": self.stacks.document(), "flight": flight}


@dataclass(eq=False)
class Diagnosis:
    """Reads and publishes stacks and flight records. Any thread may call the methods; one call runs at a time.

    The thread that creates the object counts as the training thread.
    """

    rank: int
    hand_over: Callable[[StepRecord], object]
    """Function that publishes a record from the calling thread."""
    last_step: Callable[[], int | None]
    boundary: ErrorBoundary

    def __post_init__(self) -> None:
        self._training_thread = threading.get_ident()
        self._lock = threading.Lock()
        self._taking: int | None = None  # id of the thread that takes stacks now
        self._latest: CapturedStacks | None = None
        self._taken_at = float("-inf")
        self._reader: threading.Thread | None = None

    def take(self, reason: str, *, severity: Severity = Severity.INFO, first: Event | None = None) -> CapturedStacks:
        """Read, publish and return stacks and flight record.

        If the last result is less than MIN_SECONDS old, it is returned instead and nothing is read.

        If the event `first` is given, it is published before the stacks, and the stacks are always read. If publishing
        is blocked, or a signal handler calls the method during another call, stacks are read and returned, but nothing
        is published.
        """
        # A signal handler runs on the thread that it interrupts: if that thread holds the lock, waiting would deadlock.
        if self._taking == threading.get_ident() or not self._lock.acquire(timeout=LOCK_SECONDS):
            stacks = self._stacks(reason)
            return CapturedStacks(ts=now_microseconds(), step=self.last_step(), stacks=stacks, flight=None)
        try:
            self._taking = threading.get_ident()
            return self._take(reason, severity, first)
        finally:
            self._taking = None
            self._lock.release()

    def take_written(self, text: str) -> None:
        """Publish the stacks that the handler of the setting `stacks_signal` wrote when the signal arrived."""
        with self._lock:
            self._publish_stacks(read_stacks(text, "signal", self._training_thread, _names()), Severity.INFO)

    def take_flight(self, reason: str) -> None:
        """Read and publish the flight record, without the stacks. Does nothing if torch has no flight record."""
        with self._lock:
            flight = self._flight(reason)
            if flight is not None:
                self._publish_flight(flight, Severity.INFO)

    def publish(self, event: Event) -> None:
        """Publish an event from the calling thread, without the publisher thread."""
        with self._lock:
            self._publish_event(event)

    def publish_exit(self, name: str) -> None:
        """Publish the exit event while the training thread is stuck; never waits for a thread or the device."""
        self._publish_event(exit_event(ExitReason.SIGNAL, name, self.last_step()))

    def _take(self, reason: str, severity: Severity, first: Event | None) -> CapturedStacks:
        if first is not None:
            self.boundary.call(f"recording an event ({first.type})", self._publish_event, first)
        elif self._latest is not None and time.monotonic() - self._taken_at < MIN_SECONDS:
            return self._latest
        ts, step = now_microseconds(), self.last_step()
        stacks = self._stacks(reason)
        # Stacks are published before the flight record is read: the reading may take seconds or not return.
        if stacks.threads:
            self.boundary.call("recording stacks", self._publish_stacks, stacks, severity)
        flight: FlightRecord | None = self.boundary.call("the flight record", self._flight, reason)
        if flight is not None:
            self.boundary.call("recording the flight record", self._publish_flight, flight, severity)
        self._latest, self._taken_at = CapturedStacks(ts=ts, step=step, stacks=stacks, flight=flight), time.monotonic()
        return self._latest

    def _stacks(self, reason: str) -> StackDump:
        """Return the stacks of all threads."""
        # If they cannot be read, the result has no threads: the flight record is useful without stacks.
        stacks: StackDump | None = self.boundary.call("taking stacks", take_stacks, reason, self._training_thread)
        return StackDump(reason=reason, threads=()) if stacks is None else stacks

    def _flight(self, reason: str) -> FlightRecord | None:
        if self._reader is not None and self._reader.is_alive():
            return None  # the device has not responded to the last reading; one waiting thread is enough
        found: list[FlightRecord | None] = []
        is_read = threading.Event()

        def read() -> None:
            failures: list[tuple[str, BaseException]] = []
            try:
                found.append(take_flight_record(reason, lambda *failure: failures.append(failure)))
            except Exception as error:  # noqa: BLE001 - top of the thread
                failures.append(("the flight record", error))
            is_read.set()
            # Reported after `is_read`: a report takes locks that a hanging training thread may hold.
            for failure in failures:
                self.boundary.report(*failure)

        self._reader = OwnThread(target=read, name="rankscope-flight-record", ends=False)
        self._reader.start()
        is_read.wait(FLIGHT_SECONDS)
        return found[0] if found else None

    def _publish_stacks(self, stacks: StackDump, severity: Severity) -> None:
        message = f"rank {self.rank} {Standing.of(self.rank, stacks, None)}"
        self._publish_event(_event(EventType.STACKS, severity, message, stacks.to_json()))

    def _publish_flight(self, flight: FlightRecord, severity: Severity) -> None:
        pending = flight.pending
        if pending is not None:
            message = f"waits in {pending} for {pending.age_seconds:.0f} s"
        else:
            message = f"waits in no collective; the last was {flight.latest}"
        self._publish_event(_event(EventType.FLIGHT_RECORD, severity, message, flight.to_json()))

    def _publish_event(self, event: Event) -> None:
        self.hand_over(StepRecord.now(self.last_step(), events=[event]))


def _event(kind: EventType, severity: Severity, message: str, details: str) -> Event:
    return Event(type=kind, severity=severity, message=encodable(message), details=encodable(details))
