"""The name of the C function that a thread is in, read from the bytecode of its innermost frame."""

from __future__ import annotations

import dis
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rankscope_contract.diagnostics.blame import Place, place_of
from rankscope_exporter.monitors.hangs.diagnosis import MOST_BYTES, called, innermost_call, take_stacks

LOCK = threading.Lock()
SECONDS = 60.0


def sleep_by_module(end: int) -> None:
    while not select.select([end], [], [], 0)[0]:
        time.sleep(SECONDS / 6000)


def read_by_module(end: int) -> None:
    os.read(end, 1)


def select_with_keywords(end: int) -> None:
    select.select(*([end], [], []))


def wait_for_a_lock(end: int) -> None:
    LOCK.acquire()
    LOCK.release()


def method_of_what_a_call_returned(end: int) -> None:
    (
        os.fdopen(os.dup(end), "rb", buffering=0)
        .read(1)
    )  # fmt: skip


def local_module(end: int) -> None:
    import os as system

    system.read(end, 1)


def loop_in_python(end: int) -> None:
    poll = select.poll()
    poll.register(end)
    count = 0
    while not HAS_ENDED.is_set():
        for _ in range(10_000):
            count += 1


HAS_ENDED = threading.Event()


@contextmanager
def in_a_thread(function: Callable[[int], None]) -> Iterator[int]:
    """Yield the id of a thread that executes `function` until the end of the block."""
    end, begin = os.pipe()
    HAS_ENDED.clear()
    with LOCK:
        thread = threading.Thread(target=function, args=(end,), daemon=True)
        thread.start()
        yield thread.ident or 0
    HAS_ENDED.set()
    os.write(begin, b"x")
    thread.join(10)
    os.close(begin)
    os.close(end)


def seen(ident: int, function: Callable[..., Any], wanted: Callable[[str | None], bool]) -> str | None:
    """Return the current call of the thread when it equals the expected one, or after a timeout."""
    deadline = time.monotonic() + 10
    while True:
        found = innermost_call(ident)
        name = found[1] if found is not None and found[0].function == function.__name__ else None
        if wanted(name) or time.monotonic() > deadline:
            return name


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (sleep_by_module, "time.sleep"),
        (read_by_module, "posix.read"),
        (select_with_keywords, "select.select"),
        (wait_for_a_lock, ".acquire"),
        (method_of_what_a_call_returned, ".read"),
        (local_module, ".read"),
        (loop_in_python, ""),
    ],
)
def test_current_call_has_the_name_of_its_function(function, name):
    with in_a_thread(function) as ident:
        found = seen(ident, function, lambda found: found == name)

    assert name == found


def test_only_the_training_thread_has_a_call_name():
    with in_a_thread(read_by_module) as ident:
        seen(ident, read_by_module, lambda found: found is not None)
        dump = take_stacks("hang", ident)

    assert {"posix.read", None} == {thread.calls for thread in dump.threads}
    assert "posix.read" == dump.threads[0].calls
    assert Place.OUTSIDE is place_of(dump)


def test_missing_and_calling_thread_have_no_call_name():
    assert None is innermost_call(1)
    assert None is take_stacks("call", threading.get_ident()).threads[0].calls


def test_naming_a_call_runs_no_code_of_objects():
    """Only attributes of modules are read: attribute access of other objects may run any code."""

    class Lazy:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)

    asked: list[str] = []
    code = compile("lazy.read(1)", "<test>", "exec")
    call = next(one.offset for one in dis.get_instructions(code) if one.opname == "CALL")

    assert ".read" == called(code, call, {"lazy": Lazy()})
    assert [] == asked


def test_very_long_function_is_not_analyzed():
    """The analysis would hold the GIL and delay the training."""
    code = compile("\n".join(["f(1)"] * MOST_BYTES), "<test>", "exec")
    call = next(place for place, opcode in enumerate(code.co_code) if dis.opname[opcode] == "CALL" and place % 2 == 0)

    assert None is called(code, call, {"f": len})


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("sleep(1)", "time.sleep"),
        ("time.sleep(1)", "time.sleep"),
        ("time.sleep(*[1])", "time.sleep"),
        ("time.sleep(seconds=1)", "time.sleep"),
        ("float(x)", "builtins.float"),
        ("work.wait()", ".wait"),
        ("begin(x).wait()", ".wait"),
        ("begin(1)(2)", None),
        ("table[0](2)", None),
        ("unknown(1)", None),
        ("time.unknown(1)", ".unknown"),
    ],
)
def test_name_belongs_to_the_last_call_of_the_line(source, name):
    """In a chain of calls, the last call starts first and ends last in the source."""
    code = compile(source, "<test>", "exec")
    call = [one.offset for one in dis.get_instructions(code) if one.opname.startswith("CALL")][-1]

    assert name == called(code, call, {"time": time, "sleep": time.sleep, "begin": lambda _: None, "work": object()})
