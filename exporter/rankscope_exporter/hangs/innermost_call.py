"""The C function in which a thread is, by its name alone.

A stack ends at a line of Python code. Whether that line sleeps or waits for another rank is known to the bytecode: the
instruction that is under way, and the names that were loaded for it. No value, argument or local variable is read, and
no attribute of an object other than a module, since both could run code of the training.
"""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final

from rankscope_contract.stacks import Frame

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
