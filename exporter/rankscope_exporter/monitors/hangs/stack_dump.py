"""The stacks of all threads of this process, taken by faulthandler: files, lines and functions; no values.

faulthandler walks the frames in C and takes no lock of any thread, so it does not matter what they are waiting for.
Called from Python it still needs the interpreter lock, as everything in Python does: while C code holds that, only the
handler of a configured signal can look (`stack_signal`).

A stack ends at a line of Python code. The name of the C function in which a thread is comes from the bytecode: the
instruction that is under way, and the names that were loaded for it. No value, argument or local variable is read, and
no attribute of an object other than a module, since both could run code of the training.
"""

from __future__ import annotations

import builtins
import dis
import faulthandler
import os
import re
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final

from rankscope_contract.diagnostics.stacks import MAX_DETAILS_BYTES, Frame, StackDump, ThreadStack

EXECUTES_PYTHON: Final = ""

MOST_BYTES: Final = 16_384
"""Of bytecode that is read, some 450 lines of Python: reading it takes 7 ms of the interpreter."""

_BASES: Final = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTES: Final = ("LOAD_ATTR", "LOAD_METHOD")
_CALLS: Final = ("CALL", "PRECALL")
_PARTS_OF_A_CALL: Final = ("PRECALL", "PUSH_NULL", "KW_NAMES", "CACHE", "LOAD_CONST")
_OF_THE_INTERPRETER: Final = ("JUMP_BACKWARD", "RESUME", "NOP")
"""Instructions that call nothing; a thread that executes Python code gives the interpreter lock away at these."""


def innermost_call(thread: int) -> tuple[Frame, str | None] | None:
    """Return the innermost frame of a thread and its `ThreadStack.calls`; None without such a thread."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - documented, in spite of its name
    if frame is None:
        return None
    code = frame.f_code
    # faulthandler writes file names in ASCII.
    file = code.co_filename.encode("ascii", "backslashreplace").decode("ascii")
    return Frame(file, frame.f_lineno or 0, code.co_name), called(code, frame.f_lasti, frame.f_globals)


def called(code: CodeType, offset: int, global_names: Mapping[str, Any]) -> str | None:
    """Return the function that the instruction at `offset` calls; None where it is unknown, or the code very long."""
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
    """Return the instructions that loaded the function of the last instruction, a call: its names, outermost first.

    The function begins where the call begins in the source: `time` in `time.sleep(1)`, whose argument begins later.
    """
    start = _start(instructions[-1])
    found: list[dis.Instruction] = []
    for one in reversed(instructions[:-1]):
        if start is None or _start(one) != start:
            if found:
                break
        elif one.opname not in _PARTS_OF_A_CALL:
            if not one.opname.startswith("LOAD_"):
                break  # what an earlier call or a subscript returned
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
        if isinstance(function, (BuiltinFunctionType, FunctionType)) and isinstance(function.__module__, str):
            return f"{function.__module__}.{function.__name__}"
        if isinstance(function, type):
            return f"{function.__module__}.{function.__name__}"
    return f".{loaded[-1].argval}" if loaded[-1].opname.startswith(_ATTRIBUTES) else None


def _resolved(names: Sequence[str], global_names: Mapping[str, Any]) -> Any:
    """Return the object of a dotted name, as far as modules lead to it."""
    found = global_names.get(names[0], vars(builtins).get(names[0]))
    for name in names[1:]:
        if not isinstance(found, ModuleType):
            return None
        found = vars(found).get(name)
    return found


OUR_THREADS: Final = "rankscope-"
_OUR_CODE: Final = str(Path(__file__).parents[2])
_CURRENT: Final = "Current thread"
_THREAD: Final = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)\b.*\(most recent call first\):$")
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_FRAME_CAPS: Final = (100, 40, 15, 5)  # of threads beside the training one, until the dump fits


def take_stacks(reason: str, training_thread: int) -> StackDump:
    """Return where every thread stands now; of the calling thread, without the calls that lead here."""
    dump = read_stacks(_dumped(), reason, training_thread, _names())
    if training_thread == threading.get_ident():
        return dump
    return _with_call(dump, innermost_call(training_thread))


def _with_call(dump: StackDump, found: tuple[Frame, str | None] | None) -> StackDump:
    """Return `dump` with the call of the training thread, unless the thread has moved on since the dump."""
    thread = dump.training_thread
    if thread is None or found is None or thread.frames[:1] != found[:1]:
        return dump
    called = replace(thread, calls=found[1])
    return replace(dump, threads=tuple(called if other is thread else other for other in dump.threads))


def read_stacks(text: str, reason: str, training_thread: int, names: dict[int, str] | None = None) -> StackDump:
    """Return what faulthandler wrote. Lines that are none of its own are passed over."""
    threads: list[ThreadStack] = []
    names = _names() if names is None else names
    for ident, is_current, frames in _threads(text):
        name = names.get(ident)
        thread = ThreadStack(
            ident=ident,
            frames=_without_our_calls(frames) if is_current else frames,
            name=name,
            is_training=ident == training_thread,
            is_ours=name is not None and name.startswith(OUR_THREADS),
        )
        threads.append(thread)
    threads.sort(key=lambda thread: (thread.is_ours, not thread.is_training))
    return within(StackDump(reason=reason, threads=tuple(threads)), MAX_DETAILS_BYTES)


def within(dump: StackDump, max_bytes: int) -> StackDump:
    """Return `dump`, or as much of it as has room: other threads lose their outermost calls first, then go."""
    for cap in _FRAME_CAPS:
        if _size(dump) <= max_bytes:
            return dump
        dump = _with_others_cut(dump, cap)
    while _size(dump) > max_bytes and len(dump.threads) > 1:
        dump = replace(dump, threads=dump.threads[:-1], left_out=dump.left_out + 1)
    return dump if _size(dump) <= max_bytes else replace(dump, threads=tuple(_cut(t, 5) for t in dump.threads))


def _dumped() -> str:
    with (
        tempfile.TemporaryFile()
        if not hasattr(os, "memfd_create")
        else os.fdopen(os.memfd_create("rankscope-stacks"), "w+b") as file
    ):
        faulthandler.dump_traceback(file.fileno(), all_threads=True)
        file.seek(0)
        return file.read().decode("utf-8", "replace")


def _names() -> dict[int, str]:
    return {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}


def _threads(text: str) -> list[tuple[int, bool, tuple[Frame, ...]]]:
    found: list[tuple[int, bool, list[Frame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            found.append((int(head[1], 16), line.startswith(_CURRENT), []))
        elif found and (call := _FRAME.match(line)):
            found[-1][2].append(Frame(call[1], int(call[2]) if call[2].isdecimal() else 0, call[3]))
    return [(ident, is_current, tuple(frames)) for ident, is_current, frames in found]


def _without_our_calls(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return `frames` without the innermost ones that are ours; a thread that is all ours keeps them."""
    own = next((i for i, frame in enumerate(frames) if not frame.file.startswith(_OUR_CODE)), 0)
    return tuple(frames[own:])


def _size(dump: StackDump) -> int:
    return len(dump.to_json().encode())


def _with_others_cut(dump: StackDump, frames: int) -> StackDump:
    cut = (thread if thread.is_training else _cut(thread, frames) for thread in dump.threads)
    return replace(dump, threads=tuple(cut))


def _cut(thread: ThreadStack, frames: int) -> ThreadStack:
    return replace(thread, frames=thread.frames[:frames])
